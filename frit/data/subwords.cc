#include "frit/data/subwords.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <queue>
#include <utility>

namespace frit {
namespace {

size_t character_bytes(char lead) {
  const auto c = static_cast<unsigned char>(lead);
  return c < 0x80 ? 1 : c >= 0xf0 ? 4 : c >= 0xe0 ? 3 : 2;
}

}  // namespace

void SubwordTable::add(std::string piece, int32_t id, float score) {
  longest_ = std::max(longest_, piece.size());
  pieces_.emplace(std::move(piece), Piece{id, score});
}

const SubwordTable::Piece* SubwordTable::find(std::string_view text) const {
  const auto it = pieces_.find(text);
  return it == pieces_.end() ? nullptr : &it->second;
}

bool SubwordTable::sample_bpe(std::string_view text, float p_drop, RandomStream& random,
                              std::vector<int32_t>* ids) const {
  struct Symbol {
    int32_t previous, next;  // -1 at the ends
    std::string_view text;   // empty once merged into its left neighbour
  };
  struct Pair {
    float score;
    int32_t left, right;
    size_t bytes;  // when the pair was found: tells whether it is still the same
    bool operator<(const Pair& o) const { return score != o.score ? score < o.score : left > o.left; }
  };
  std::vector<Symbol> symbols;
  for (size_t at = 0; at < text.size();) {
    const size_t bytes = std::min(character_bytes(text[at]), text.size() - at);
    const auto i = static_cast<int32_t>(symbols.size());
    symbols.push_back({i - 1, i + 1, text.substr(at, bytes)});
    at += bytes;
  }
  if (symbols.empty()) return true;
  symbols.back().next = -1;
  std::priority_queue<Pair> agenda;
  auto offer = [&](int32_t left, int32_t right) {
    if (left < 0 || right < 0) return;
    const std::string_view joined(symbols[left].text.data(), symbols[left].text.size() + symbols[right].text.size());
    if (const Piece* piece = find(joined)) agenda.push({piece->score, left, right, joined.size()});
  };
  for (size_t i = 1; i < symbols.size(); ++i) offer(static_cast<int32_t>(i) - 1, static_cast<int32_t>(i));
  while (!agenda.empty()) {
    const Pair top = agenda.top();
    agenda.pop();
    Symbol &left = symbols[top.left], &right = symbols[top.right];
    if (left.text.empty() || right.text.empty() || left.text.size() + right.text.size() != top.bytes) continue;
    if (p_drop > 0 && random.uniform() < p_drop) continue;
    left.text = {left.text.data(), top.bytes};
    left.next = right.next;
    if (right.next >= 0) symbols[right.next].previous = top.left;
    right.text = {};
    offer(left.previous, top.left);
    offer(top.left, left.next);
  }
  const size_t before = ids->size();
  for (int32_t i = 0; i >= 0; i = symbols[i].next) {
    const Piece* piece = find(symbols[i].text);
    if (piece == nullptr) {
      ids->resize(before);
      return false;
    }
    ids->push_back(piece->id);
  }
  return true;
}

bool SubwordTable::sample_unigram(std::string_view text, float alpha, int nbest, RandomStream& random,
                                  std::vector<int32_t>* ids) const {
  // Arcs of the lattice, by end position; positions are bytes (those inside a character have no arc).
  struct Arc {
    size_t begin;
    int32_t id;
    float score;
  };
  const size_t n = text.size();
  if (n == 0) return true;
  std::vector<std::vector<Arc>> ending(n + 1);
  for (size_t begin = 0; begin < n; begin += std::min(character_bytes(text[begin]), n - begin)) {
    for (size_t end = begin; end < n && end - begin < longest_;) {
      end += std::min(character_bytes(text[end]), n - end);
      if (const Piece* piece = find(text.substr(begin, end - begin)))
        ending[end].push_back({begin, piece->id, piece->score});
    }
  }
  std::vector<int32_t> reversed;
  if (nbest < 0) {
    constexpr double kNone = -std::numeric_limits<double>::infinity();
    std::vector<double> forward(n + 1, kNone);  // log of the summed weight of all ways to reach a position
    forward[0] = 0;
    for (size_t end = 1; end <= n; ++end) {
      double top = kNone, sum = 0;
      for (const Arc& a : ending[end]) top = std::max(top, forward[a.begin] + static_cast<double>(alpha) * a.score);
      if (top == kNone) continue;
      for (const Arc& a : ending[end]) sum += std::exp(forward[a.begin] + static_cast<double>(alpha) * a.score - top);
      forward[end] = top + std::log(sum);
    }
    if (forward[n] == kNone) return false;
    for (size_t end = n; end > 0;) {
      double left = random.uniform();
      const Arc* chosen = nullptr;
      for (const Arc& a : ending[end]) {
        if (forward[a.begin] == kNone) continue;
        chosen = &a;  // the last one takes what rounding leaves
        left -= std::exp(forward[a.begin] + static_cast<double>(alpha) * a.score - forward[end]);
        if (left < 0) break;
      }
      reversed.push_back(chosen->id);
      end = chosen->begin;
    }
  } else {
    struct Way {
      double score;
      const Arc* arc;
      int32_t rank;  // among the ways to arc->begin
    };
    std::vector<std::vector<Way>> best(n + 1);
    best[0].push_back({0, nullptr, 0});
    for (size_t end = 1; end <= n; ++end) {
      auto& ways = best[end];
      for (const Arc& a : ending[end])
        for (size_t r = 0; r < best[a.begin].size(); ++r)
          ways.push_back({best[a.begin][r].score + a.score, &a, static_cast<int32_t>(r)});
      std::stable_sort(ways.begin(), ways.end(), [](const Way& a, const Way& b) { return a.score > b.score; });
      if (ways.size() > static_cast<size_t>(nbest)) ways.resize(static_cast<size_t>(nbest));
    }
    if (best[n].empty()) return false;
    double sum = 0;
    for (const Way& w : best[n]) sum += std::exp(static_cast<double>(alpha) * (w.score - best[n][0].score));
    double left = random.uniform() * sum;
    size_t rank = 0;
    for (; rank + 1 < best[n].size(); ++rank) {
      left -= std::exp(static_cast<double>(alpha) * (best[n][rank].score - best[n][0].score));
      if (left < 0) break;
    }
    for (size_t end = n; end > 0;) {
      const Way& way = best[end][rank];
      reversed.push_back(way.arc->id);
      end = way.arc->begin;
      rank = static_cast<size_t>(way.rank);
    }
  }
  ids->insert(ids->end(), reversed.rbegin(), reversed.rend());
  return true;
}

}  // namespace frit
