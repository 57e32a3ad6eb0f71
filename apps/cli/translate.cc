// `frit translate MODEL [FILE]`: lines in, translations out, in order, as they come.
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <iostream>

#include "apps/cli/cli.h"
#include "apps/cli/generate_flags.h"
#include "apps/cli/lines.h"
#include "frit/core/error.h"
#include "frit/train/progress.h"

namespace frit::cli {
namespace {

struct Options {
  std::string model, file;
  std::string invalid_utf8 = "error";
  bool scores = false, stats = false, ids = false;
  GenerateFlags generate;
};

// Input that pauses this long is translated as far as it has come.
constexpr int kPauseMs = 5;

// A translation is one line, whatever characters the model may have made up of bytes.
std::string one_line(std::string text) {
  std::replace(text.begin(), text.end(), '\n', ' ');
  return text;
}

// What is printed of a translation: its text, or its tokens' ids.
std::string shown(const Translation& t, bool ids) {
  if (!ids) return one_line(t.text);
  std::string text;
  for (const int32_t id : t.tokens) text += (text.empty() ? "" : " ") + std::to_string(id);
  return text;
}

void print(int64_t line, const std::vector<Translation>& translations, bool list, bool ids) {
  if (!list) {
    std::cout << (translations.empty() ? "" : shown(translations.front(), ids)) << '\n';
  } else {
    for (const Translation& t : translations)
      std::cout << fmt::format("{} ||| {} ||| {:.6f}\n", line, shown(t, ids), t.score);
  }
}

int translate(const Options& o) {
  LineSource source(o.file);
  ThreadPool pool(o.generate.threads);
  Translator translator(model_directory(o.model), pool, o.generate.place());
  translator.on_notice = notice;
  TranslateOptions options = o.generate.apply(translator);
  const bool list = o.scores || o.generate.nbest.has_value();
  const bool interactive = source.is_terminal();
  if (interactive) std::cerr << "Type a sentence and press Enter; Ctrl-D ends.\n";

  // A line of the input, checked here so that messages have its number; "" for one that is left out.
  const auto read = [&](std::string* line) {
    if (interactive) std::cerr << "> " << std::flush;
    if (!source.next(line)) return false;
    const int64_t bad = first_invalid_utf8(*line);
    if (bad < 0) return true;
    const std::string what = fmt::format("{}:{}: invalid UTF-8 at byte {}", source.name(), source.number(), bad + 1);
    if (o.invalid_utf8 == "error" && !interactive) fail("{} (--invalid-utf8 skip leaves such lines empty)", what);
    notice(what + "; its translation is empty");
    line->clear();
    return true;
  };

  const auto begin = std::chrono::steady_clock::now();
  int64_t lines = 0, tokens = 0;
  for (bool end = false; !end;) {
    // One call takes the lines up to the next pause: full batches from a file, no waiting on a pipe.
    bool first = true;
    const auto next = [&]() -> std::optional<std::string> {
      if (!first && (interactive || !source.ready(kPauseMs))) return std::nullopt;
      first = false;
      std::string line;
      if (end || !read(&line)) {
        end = true;
        return std::nullopt;
      }
      ++lines;
      return line;
    };
    options.first_line = lines;
    translator.translate(
        next,
        [&](int64_t line, const std::vector<Translation>& translations) {
          print(line, translations, list, o.ids);
          if (!std::cout) fail("cannot write to standard output");
          for (const Translation& t : translations) tokens += static_cast<int64_t>(t.tokens.size());
          // Nothing reads on once the other end is gone; SIGPIPE has told us then.
          if (interactive) std::cout.flush();
        },
        options);
    if (!std::cout.flush()) fail("cannot write to standard output");
  }
  if (interactive) std::cerr << '\n';
  if (o.stats) {
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    notice(fmt::format("{} lines in {:.2f} s: {:.1f} lines/s, {:.0f} output tokens/s", format_count(lines), seconds,
                       static_cast<double>(lines) / seconds, static_cast<double>(tokens) / seconds));
  }
  return kGood;
}

}  // namespace

void add_translate(CLI::App& app, Action* action) {
  CLI::App* sub = app.add_subcommand("translate", "Translates a file, standard input, or what is typed");
  auto o = std::make_shared<Options>();
  sub->add_option("MODEL", o->model, "Model directory (Hugging Face layout), or a run directory with a finished model")
      ->type_name("")
      ->required();
  sub->add_option("file", o->file, "Text, a sentence a line; without it or with - standard input")->type_name("FILE");
  sub->add_flag("--scores", o->scores, "Print `LINE ||| TRANSLATION ||| SCORE`, lines counted from 0");
  sub->add_flag("--ids", o->ids, "Print the ids of the tokens, end token included, instead of text");
  sub->add_option("--invalid-utf8", o->invalid_utf8,
                  "error: stop at a line that is not UTF-8; skip: translate it to an "
                  "empty line")
      ->check(CLI::IsMember({"error", "skip"}));
  sub->add_flag("--stats", o->stats, "Say at the end how fast it went");
  o->generate.add_to(*sub);
  sub->footer(
      "One line of output for each line of input, in the same order; an empty line stays empty. With --nbest or\n"
      "--scores each translation is a line `LINE ||| TRANSLATION ||| SCORE`. Output comes as soon as the input "
      "pauses.\n\n"
      "Examples:\n"
      "  frit translate run/model                          type sentences, read translations\n"
      "  frit translate run/model news.en > news.de\n"
      "  echo 'Good morning.' | frit translate run/model --beam 4 --nbest 4\n"
      "  frit translate run/model news.en --sample --top-k 10 --seed 7");
  sub->callback([o, action] { *action = [o] { return translate(*o); }; });
}

}  // namespace frit::cli
