// Translates the lines of a file, two translations each: how to choose the device, its numbers and the search. A long
// file needs nothing more: lines are read, tokenised, translated and handed on at the same time, in their order.
//
// usage: example_translate_file [MODEL [FILE [cpu|cuda [fp32|fp16|bf16]]]]
#include <fmt/core.h>

#include <fstream>
#include <iostream>
#include <sstream>
#include <stdexcept>

#include "frit/infer/translator.h"

int run(int argc, char** argv) {
  frit::ThreadPool pool;
  frit::TranslatorDevice where;
  if (argc > 3) where.device = argv[3];
  if (argc > 4) where.dtype = argv[4];
  frit::Translator translator(argc > 1 ? argv[1] : "example_run/model", pool, where);
  translator.on_notice = [](std::string_view text) { std::cerr << text << "\n"; };

  frit::TranslateOptions options = translator.default_options();
  options.generate.beam = 4;
  options.generate.nbest = 2;        // two translations of each line,
  options.generate.diversity = 0.5;  // which differ in more than their last words
  options.invalid_utf8 = frit::InvalidUtf8::kSkip;

  std::ifstream file;
  std::istringstream sentences("the small dog sees the red house\n\nthe old man has a green book\n");
  if (argc > 2) {
    file.open(argv[2]);
    if (!file) throw std::runtime_error(std::string("cannot read ") + argv[2]);
  }
  std::istream& in = argc > 2 ? static_cast<std::istream&>(file) : sentences;
  translator.translate(
      [&]() -> std::optional<std::string> {
        std::string line;
        return std::getline(in, line) ? std::optional(line) : std::nullopt;
      },
      [](int64_t line, const std::vector<frit::Translation>& translations) {
        for (const frit::Translation& t : translations)
          std::cout << fmt::format("{}: {} ({:.2f})\n", line + 1, t.text, t.score);
      },
      options);
  if (!std::cout.flush()) throw std::runtime_error("the output cannot be written");
  return 0;
}

int main(int argc, char** argv) try { return run(argc, argv); } catch (const std::exception& e) {
  std::cerr << "error: " << e.what() << "\n";
  return 1;
}
