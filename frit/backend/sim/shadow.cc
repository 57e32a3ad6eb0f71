// The simulator's shadow memory: checks and counts each access.
#include <algorithm>
#include <bit>
#include <cstring>

#include "frit/backend/sim/internal.h"
#include "frit/core/error.h"

namespace frit::sim {

namespace {

const char* verb(Access access) {
  switch (access) {
    case Access::kRead:
      return "reads";
    case Access::kWrite:
      return "writes";
    case Access::kAtomic:
      return "updates";
  }
  return "";
}

std::string tensor_text(const Region& region) {
  return fmt::format("a tensor of {} {} elements", region.elements(), name_of(region.dtype));
}

enum class Trouble { kNone, kUnwritten, kWriter, kReader, kPending };

// Checks one access to one cell against its shadow, and notes it there. floor: records below it are ordered.
template <Access access>
[[gnu::always_inline]] inline Trouble note(Machine& m, Cell& cell, Record mine, Record floor, bool written) {
  const Record writer = cell.writer;
  if (access != Access::kWrite && !(writer & kValid) && !written) return Trouble::kUnwritten;
  const bool beside_atomics = access == Access::kAtomic && (writer & kAtomicBit);
  if (writer >= floor && !beside_atomics && !m.ordered(writer)) return Trouble::kWriter;
  const Record reader = cell.reader;
  if constexpr (access == Access::kRead) {
    if (reader < floor)
      cell.reader = mine;
    else if (reader != mine)
      cell.reader = m.ordered(reader) ? mine : m.widened(reader, mine);
  } else {
    if (reader >= floor && !m.ordered(reader)) return Trouble::kReader;
    if constexpr (access == Access::kWrite)
      cell.writer = mine;
    else
      cell.writer =
          (writer < floor || !beside_atomics || m.ordered(writer) ? mine : m.widened(writer, mine)) | kAtomicBit;
  }
  return Trouble::kNone;
}

template <Access access>
inline Trouble note_all(Machine& m, Cell* cells, int count, Record mine, Record floor, bool written, int& at) {
  for (int i = 0; i < count; ++i) {
    const Trouble trouble = note<access>(m, cells[i], mine, floor, written);
    if (trouble != Trouble::kNone) [[unlikely]] {
      at = i;
      return trouble;
    }
  }
  return Trouble::kNone;
}
inline Trouble note_any(Machine& m, Cell* cells, int count, Record mine, Record floor, bool written, Access access,
                        int& at) {
  switch (access) {
    case Access::kRead:
      return note_all<Access::kRead>(m, cells, count, mine, floor, written, at);
    case Access::kWrite:
      return note_all<Access::kWrite>(m, cells, count, mine, floor, written, at);
    case Access::kAtomic:
      return note_all<Access::kAtomic>(m, cells, count, mine, floor, written, at);
  }
  return Trouble::kNone;
}

[[noreturn, gnu::cold, gnu::noinline]] void fault_of(const Machine& m, Trouble trouble, Access access, const Cell& cell,
                                                     const std::string& where) {
  switch (trouble) {
    case Trouble::kUnwritten:
      m.fault(fmt::format("{} {}, which nothing has written", verb(access), where));
    case Trouble::kWriter:
      m.fault(fmt::format("race: {} {}, which {} {}; no barrier orders the two", verb(access), where,
                          m.who(cell.writer), cell.writer & kAtomicBit ? "updated" : "wrote"));
    default:
      m.fault(fmt::format("race: {} {}, which {} read; no barrier orders the two", verb(access), where,
                          m.who(cell.reader)));
  }
}

[[noreturn, gnu::cold, gnu::noinline]] void global_fault(const Machine& m, const void* p, int bytes, Access access,
                                                         const Region* region) {
  if (!m.current->waited) m.fault(fmt::format("{} global memory before wait_for_previous()", verb(access)));
  if (!region) m.fault(fmt::format("{} {} bytes at {}, where no tensor lives", verb(access), bytes, p));
  const int64_t offset = static_cast<int64_t>(reinterpret_cast<uintptr_t>(p) - region->begin);
  const int64_t element = offset >> region->shift;
  if (offset < 0 || static_cast<uint64_t>(offset) + static_cast<uint64_t>(bytes) > region->bytes)
    m.fault(fmt::format("out of bounds: {} {} bytes at element {} of {}", verb(access), bytes, element,
                        tensor_text(*region)));
  if (bytes < 1 << region->shift)
    m.fault(fmt::format("{} {} bytes inside element {} of {}", verb(access), bytes, element, tensor_text(*region)));
  m.fault(fmt::format("misaligned: {} {} bytes at element {} of {}, {} bytes past a multiple of {}", verb(access),
                      bytes, element, tensor_text(*region),
                      reinterpret_cast<uintptr_t>(p) % static_cast<uintptr_t>(bytes), bytes));
}

}  // namespace

void Machine::fault(const std::string& what) const {
  throw Fault(
      fmt::format("[kernel {}, block {}, thread {}] {}", kernel, block, current ? current->place.thread : 0, what));
}

std::string Machine::who(Record r) const {
  const auto run =
      std::upper_bound(block_serials.begin(), block_serials.end(), serial_of(r)) - block_serials.begin() - 1;
  const int64_t index = order == Order::kForward ? run : blocks - 1 - run;
  switch (scope_of(r)) {
    case kOneThread:
      return fmt::format("thread {} of block {}", thread_of(r), index);
    case kOneWarp:
      if (serial_of(r) != serial) break;  // its lane set is gone
      return fmt::format("several threads of warp {} of block {}", lane_sets[static_cast<size_t>(thread_of(r))].warp,
                         index);
    default:
      break;
  }
  return fmt::format("several threads, the last of block {},", index);
}

// Whether all the accesses that r stands for are ordered before what the current thread does now.
bool Machine::ordered(Record r) const {
  if (r < launch_floor) return true;
  const Scope scope = scope_of(r);
  const bool beyond = r < block_floor || scope == kBlocks;  // other blocks take part
  if (beyond && !(joined && release_of(r) < releases)) return false;
  if (r < block_floor || serial_of(r) < serial) return true;
  const int me = current->place.thread;
  const Warp& warp = *current->warp;
  const uint32_t time = time_of(r);
  switch (scope) {
    case kBlocks:
      return thread_of(r) == me;
    case kOneBlock:
      return false;
    case kOneThread: {
      const int thread = thread_of(r);
      if (thread == me) return true;
      if (thread >> 5 != warp.index) return false;
      return time < warp.ordered_at || (warp.partial && time < warp.knows[me & 31][thread & 31]);
    }
    case kOneWarp: {
      const LaneSet& set = lane_sets[static_cast<size_t>(thread_of(r))];
      if (set.warp != warp.index) return false;
      if (time < warp.ordered_at) return true;
      if (!warp.partial) return false;
      for (uint32_t others = set.lanes & ~current->bit; others; others &= others - 1)
        if (time >= warp.knows[me & 31][std::countr_zero(others)]) return false;
      return true;
    }
  }
  return false;
}

// The record that stands for old and for mine, which nothing orders.
Record Machine::widened(Record old, Record mine) {
  constexpr Record both = Record{3} << kScopeShift | Record{3} << kReleaseShift;
  const Record release = static_cast<Record>(std::max(release_of(old), release_of(mine))) << kReleaseShift;
  const auto with = [&](Scope scope) { return (mine & ~both) | static_cast<Record>(scope) << kScopeShift | release; };
  if (old < block_floor || scope_of(old) == kBlocks) return with(kBlocks);
  const size_t thread = static_cast<size_t>(thread_of(old)), warp = static_cast<size_t>(current->warp->index);
  if (scope_of(old) == kOneBlock) return with(kOneBlock);
  const bool alone = scope_of(old) == kOneThread;
  if ((alone ? thread >> 5 : lane_sets[thread].warp) != warp) return with(kOneBlock);
  const uint32_t lanes = (alone ? 1u << (thread & 31) : lane_sets[thread].lanes) | current->bit;
  size_t set;
  if (!alone && lanes == lane_sets[thread].lanes) {
    set = thread;
  } else {
    uint16_t& next = alone ? pair_of_thread[thread] : lane_sets[thread].next;
    set = next;
    if (set < 32 || set >= static_cast<size_t>(lane_set_count) || lane_sets[set].lanes != lanes ||
        lane_sets[set].warp != warp) {
      if (lane_set_count < 1024) {
        set = static_cast<size_t>(lane_set_count++);
        lane_sets[set] = {lanes, static_cast<uint16_t>(warp), 0};
        next = static_cast<uint16_t>(set);
      } else {
        set = warp;
      }
    }
  }
  constexpr Record thread_bits = Record{1023} << kThreadShift;
  return (with(kOneWarp) & ~thread_bits) | static_cast<Record>(set) << kThreadShift;
}

void Machine::log_sector(std::vector<SectorLog>& log, uint32_t& ordinal, uintptr_t p, int64_t& sectors) {
  Thread& t = *current;
  const Warp& warp = *t.warp;
  if (t.log_generation != warp.generation) t.log_generation = warp.generation, t.reads = t.writes = t.shareds = 0;
  const uint32_t index = ordinal++;
  if (index >= log.size()) log.resize(std::max<size_t>(16, log.size() * 2));
  SectorLog& entry = log[index];
  if (entry.generation != warp.generation) entry.generation = warp.generation, entry.count = 0;
  const uint32_t sector = static_cast<uint32_t>(p >> 5);
  for (int i = entry.count; i-- > 0;)
    if (entry.sectors[i] == sector) return;
  if (entry.count < 32) entry.sectors[entry.count++] = sector;
  ++sectors;
}

void Machine::log_banks(int64_t offset, int bytes) {
  Thread& t = *current;
  Warp& warp = *t.warp;
  if (t.log_generation != warp.generation) t.log_generation = warp.generation, t.reads = t.writes = t.shareds = 0;
  const int phases = bytes <= 4 ? 1 : bytes / 4;
  const uint32_t index = t.shareds++ * 4 + static_cast<uint32_t>((t.place.thread & 31) * phases / 32);
  if (index >= warp.bank_log.size()) warp.bank_log.resize(std::max<size_t>(64, warp.bank_log.size() * 2));
  BankLog& entry = warp.bank_log[index];
  if (entry.generation != warp.generation) {
    entry.generation = warp.generation, entry.banks = 0, entry.rounds = entry.extra = 0;
    ++counts.shared_accesses;
  }
  for (int64_t word = offset / 4; word * 4 < offset + bytes; ++word) {
    const int bank = static_cast<int>(word & 31);
    const uint16_t w = static_cast<uint16_t>(word);
    if (!(entry.banks >> bank & 1)) {
      entry.banks |= 1u << bank;
      entry.first_word[bank] = w, entry.words_in_bank[bank] = 1;
    } else if (entry.first_word[bank] == w) {
      continue;
    } else {
      bool seen = false;
      for (int i = 0; i < entry.extra && !seen; ++i) seen = entry.extra_words[i] == w;
      if (seen) continue;
      if (entry.extra < 32) entry.extra_words[entry.extra++] = w;
      ++entry.words_in_bank[bank];
    }
    if (entry.words_in_bank[bank] > entry.rounds) entry.rounds = entry.words_in_bank[bank], ++counts.shared_rounds;
  }
}

Region* find_region(const void* p) {
  return running_machine().find(reinterpret_cast<uintptr_t>(p));
}

void touch_global(const void* p, int bytes, Access access, Region*& region) {
  Machine& m = running_machine();
  const uintptr_t address = reinterpret_cast<uintptr_t>(p);
  if (!region) region = m.find(address);
  const Region* r = region;
  if (!r) global_fault(m, p, bytes, access, r);
  const uint64_t offset = address - r->begin, size = static_cast<uint64_t>(bytes);
  if (!m.current->waited || offset >= r->bytes || size > r->bytes - offset || (address & (size - 1)) ||
      bytes < 1 << r->shift || (offset & ((uint64_t{1} << r->shift) - 1)))
    global_fault(m, p, bytes, access, r);
  Cell* cells = r->cells + (offset >> r->shift);
  const Record mine = m.record() | static_cast<Record>(m.releases) << kReleaseShift;
  int at = 0;
  const Trouble trouble = note_any(m, cells, bytes >> r->shift, mine, m.launch_floor, r->filled, access, at);
  if (trouble != Trouble::kNone) [[unlikely]]
    fault_of(m, trouble, access, cells[at],
             fmt::format("element {} of {}", (offset >> r->shift) + static_cast<uint64_t>(at), tensor_text(*r)));
  if (access == Access::kRead)
    m.counts.read_bytes += bytes;
  else if (access == Access::kWrite)
    m.counts.written_bytes += bytes;
  else
    ++m.counts.atomics;
  if (m.detailed && access != Access::kAtomic) {
    const bool read = access == Access::kRead;
    Thread& t = *m.current;
    m.log_sector(read ? t.warp->read_log : t.warp->write_log, read ? t.reads : t.writes, address,
                 read ? m.counts.read_sectors : m.counts.written_sectors);
  }
}

namespace {

// Where a shared access lies; throws if it lies outside or is misaligned.
void check_shared(const Machine& m, int64_t offset, int bytes, Access access) {
  if (offset < 0 || offset + bytes > m.shared_size) [[unlikely]]
    m.fault(fmt::format("out of bounds: {} {} bytes at byte {} of {} bytes of shared memory", verb(access), bytes,
                        offset, m.shared_size));
  if (offset & (bytes - 1)) [[unlikely]]
    m.fault(fmt::format("misaligned: {} {} bytes at byte {} of shared memory", verb(access), bytes, offset));
}

void note_shared(Machine& m, int64_t offset, int bytes, Access access, Record flags) {
  Cell* cells = m.shared_cells + offset / 2;
  const int count = bytes / 2;
  for (int i = 0; i < count; ++i) {
    // What an earlier block left is unwritten for this one.
    if (cells[i].writer < m.block_floor)
      cells[i].writer = 0;
    else if (cells[i].writer & kPending) [[unlikely]]
      m.fault(fmt::format("{} {} bytes at byte {} of shared memory, where a copy_async of {} has not been waited for",
                          verb(access), bytes, offset, m.who(cells[i].writer)));
  }
  int at = 0;
  const Trouble trouble = note_any(m, cells, count, m.record(), m.block_floor, false, access, at);
  if (trouble != Trouble::kNone) [[unlikely]]
    fault_of(m, trouble, access, cells[at], fmt::format("{} bytes at byte {} of shared memory", bytes, offset));
  if (flags)
    for (int i = 0; i < count; ++i) cells[i].writer |= flags;
}

}  // namespace

unsigned char* touch_shared(int64_t offset, int bytes, Access access) {
  Machine& m = running_machine();
  check_shared(m, offset, bytes, access);
  note_shared(m, offset, bytes, access, 0);
  if (m.detailed) m.log_banks(offset, bytes);
  return m.shared + offset;
}

void copy_async(int64_t shared_offset, const void* from, int bytes, int bytes_valid, Region*& region) {
  Machine& m = running_machine();
  check_shared(m, shared_offset, bytes, Access::kWrite);
  if (bytes_valid > 0) touch_global(from, bytes_valid, Access::kRead, region);
  // The hardware may write from now on until the wait: whoever still uses the old bytes races with it.
  note_shared(m, shared_offset, bytes, Access::kWrite, kPending);
  if (m.detailed) m.log_banks(shared_offset, bytes);
  m.current->copies.push_back({shared_offset, static_cast<const unsigned char*>(from), bytes, bytes_valid, region});
}

void commit_async() {
  Thread& t = *running_machine().current;
  size_t committed = 0;
  for (int count : t.groups) committed += static_cast<size_t>(count);
  t.groups.push_back(static_cast<int>(t.copies.size() - committed));
}

void wait_async(int groups_left) {
  Machine& m = running_machine();
  Thread& t = *m.current;
  size_t landed = 0;
  while (t.groups.size() > static_cast<size_t>(groups_left)) {
    landed += static_cast<size_t>(t.groups.front());
    t.groups.erase(t.groups.begin());
  }
  for (size_t i = 0; i < landed; ++i) {
    const AsyncCopy& copy = t.copies[i];
    std::memset(m.shared + copy.shared_offset, 0, static_cast<size_t>(copy.bytes));
    if (copy.bytes_valid > 0)
      std::memcpy(m.shared + copy.shared_offset, copy.from, static_cast<size_t>(copy.bytes_valid));
    for (int j = 0; j < copy.bytes / 2; ++j) m.shared_cells[copy.shared_offset / 2 + j].writer = m.record();
  }
  t.copies.erase(t.copies.begin(), t.copies.begin() + static_cast<std::ptrdiff_t>(landed));
}

}  // namespace frit::sim
