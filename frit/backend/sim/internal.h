// The inside of the simulator: shadow records, fibers, warps, and the Machine that the words work on.
#pragma once
#include <array>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "frit/backend/sim/machine.h"

namespace frit::sim {

// One access, in 64 bits. Every block run and every block barrier gets the next serial number, so records of earlier
// launches and of earlier barriers are told by comparing numbers:
//   serial 32 | thread 10 | time 16 (warp barriers since the serial began) | release 2 | scope 2 | atomic 1 | valid 1
// scope says whose accesses the record stands for, when it stands for several that nothing orders.
using Record = uint64_t;
constexpr Record kValid = 1, kAtomicBit = 2;
// For kOneWarp the thread bits are an index into Machine::lane_sets.
enum Scope : uint32_t { kOneThread, kOneWarp, kOneBlock, kBlocks };
constexpr int kScopeShift = 2, kReleaseShift = 4, kTimeShift = 6, kThreadShift = 22, kSerialShift = 32;
constexpr uint32_t kMaxTime = 0xffff, kMaxRelease = 3;
// In shared memory, which other blocks never see, the release bits say that copy_async has not landed here yet.
constexpr Record kPending = Record{1} << kReleaseShift;
inline uint32_t serial_of(Record r) {
  return static_cast<uint32_t>(r >> kSerialShift);
}
inline int thread_of(Record r) {
  return static_cast<int>(r >> kThreadShift & 1023);
}
inline uint32_t time_of(Record r) {
  return static_cast<uint32_t>(r >> kTimeShift & kMaxTime);
}
inline uint32_t release_of(Record r) {
  return static_cast<uint32_t>(r >> kReleaseShift & kMaxRelease);
}
inline Scope scope_of(Record r) {
  return static_cast<Scope>(r >> kScopeShift & 3);
}

// The shadow of one element: who wrote it last, and who read it since.
struct Cell {
  Record writer, reader;
};

struct Region {
  uintptr_t begin = 0;
  uint64_t bytes = 0;
  int shift = 0;  // log2 of an element's bytes
  bool mapped = false;
  bool filled = false;  // written as a whole: cells without a writer count as written
  DType dtype = DType::kU8;
  Cell* cells = nullptr;
  uint64_t elements() const { return bytes >> shift; }
};

// A stack and where it left off.
struct Fiber {
  void* context = nullptr;
  char* stack = nullptr;
  size_t stack_bytes = 0;
  void* sanitizer = nullptr;  // ThreadSanitizer's fiber, AddressSanitizer's fake stack
};

struct Warp;
struct AsyncCopy {
  int64_t shared_offset;
  const unsigned char* from;
  int bytes, bytes_valid;
  Region* region;
};
struct Slots {
  Slot lanes[32];
  int holders = 0;  // lanes that may still read it
};
struct Thread {
  Place place;
  Warp* warp = nullptr;
  uint32_t bit = 0;  // 1 << lane
  Fiber* fiber = nullptr;
  Slots* slots = nullptr;  // the result of its last collective
  bool waited = false;     // wait_for_previous() passed
  uint32_t log_generation = 0;
  uint32_t reads = 0, writes = 0, shareds = 0;  // accesses since log_generation began
  std::vector<AsyncCopy> copies;                // in flight, oldest first
  std::vector<int> groups;                      // committed: copies in each
};

// Lanes of a warp whose accesses one record stands for.
struct LaneSet {
  uint32_t lanes = 0;
  uint16_t warp = 0;
  uint16_t next = 0;  // the set that the last lane to join made of this one
};

// Lanes that meet at one collective.
struct Meeting {
  uint32_t mask = 0, arrived = 0;
  const char* what = nullptr;
  int bytes = 0;
  Slots* slots = nullptr;
};

// The n-th accesses of a warp's lanes since their last synchronisation.
struct SectorLog {
  uint32_t generation = 0;
  int count = 0;
  uint32_t sectors[32];
};
struct BankLog {  // one phase of one access to shared memory
  uint32_t generation = 0;
  uint32_t banks = 0;  // touched
  int rounds = 0, extra = 0;
  uint8_t words_in_bank[32];
  uint16_t first_word[32];
  uint16_t extra_words[32];  // words beyond the first of a bank
};
struct Warp {
  int index = 0;
  uint32_t lanes = 0;  // that exist
  uint32_t ended = 0, at_barrier = 0;
  uint32_t time = 0;        // warp barriers completed since the serial began
  uint32_t ordered_at = 0;  // accesses of earlier times are ordered for all lanes
  bool partial = false;     // knows[][] holds more than ordered_at
  uint16_t knows[32][32];   // [lane][other]: lane is ordered behind other's accesses of earlier times
  int meetings = 0;
  std::array<Meeting, 32> meeting;
  std::vector<std::unique_ptr<Slots>> all_slots;
  std::vector<Slots*> free_slots;
  uint32_t generation = 1;
  std::vector<SectorLog> read_log, write_log;
  std::vector<BankLog> bank_log;  // 4 phases an access
};

class Machine {
 public:
  Machine();
  ~Machine();

  // Held through every call of a queue that touches what follows; a recorded call makes others.
  std::recursive_mutex mutex;

  // ---- Memory ----
  std::map<uintptr_t, Region*> living;  // by first address
  std::vector<std::unique_ptr<Region>> regions;
  std::vector<Region*> free_regions;
  struct Allocation {
    size_t bytes;
    bool mapped;
  };
  std::map<void*, Allocation> allocations;
  Region* find(uintptr_t p) const;
  void drop_cells(Region& region);
  void clear_cells(Region& region);
  void mark(void* p, size_t bytes, bool written);
  void renumber();

  // ---- A launch ----
  Order order = Order::kForward;
  bool detailed = true;  // count sectors and bank conflicts
  Counts counts;
  const char* kernel = "";
  SimGpu::Body body{};
  int64_t blocks = 0, blocks_done = 0, block = 0;
  int thread_total = 0;
  int64_t shared_size = 0;
  uint32_t serial = 0;                       // of now
  Record launch_floor = 0, block_floor = 0;  // first record of this launch and of this block
  std::vector<uint32_t> block_serials;       // first serial of each block run in this launch
  bool joined = false;                       // this block is ordered behind the others
  uint32_t releases = 0;
  int64_t block_barriers = 0, most_barriers = 0;
  std::exception_ptr error;
  unsigned char* shared = nullptr;  // 256-byte aligned
  Cell* shared_cells = nullptr;     // one for two bytes

  // ---- Threads ----
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  Thread* current = nullptr;
  int fresh = 0, ended = 0, at_barrier = 0;
  std::array<uint16_t, 1024> ready;
  uint32_t ready_head = 0, ready_tail = 0;
  const Thread* barrier_first = nullptr;  // the first that came to the barrier, and where
  std::source_location barrier_where;

  Fiber main;
  std::vector<std::unique_ptr<Fiber>> fibers;
  std::vector<Fiber*> free_fibers;
  Fiber* running = nullptr;

  void launch();
  void begin_block();
  void start_thread();
  void end_thread();
  bool next_block();  // false after the last
  void run_threads();
  void suspend();
  void make_ready(const Thread& t) { ready[ready_tail++ & 1023] = static_cast<uint16_t>(t.place.thread); }
  void switch_to(Fiber& to);
  Fiber& free_fiber();
  void reset_fibers();
  void drop_fibers();
  void enter_main();  // the stack that launch() runs on
  void next_serial();
  void meet(uint32_t mask, const char* what, const void* value, int bytes);
  void complete_warp_barrier(Warp& warp, uint32_t mask);
  std::string waiting() const;

  // ---- Shadow ----
  Record record() const {
    return static_cast<Record>(serial) << kSerialShift | static_cast<Record>(current->place.thread) << kThreadShift |
           static_cast<Record>(current->warp->time) << kTimeShift | kValid;
  }
  // Since the serial began. The first 32 are the whole warps, which stand in when there is no place for more.
  std::array<LaneSet, 1024> lane_sets;
  int lane_set_count = 32;
  std::array<uint16_t, 1024> pair_of_thread{};  // the set that the last lane to join made of this thread alone
  bool ordered(Record r) const;
  Record widened(Record old, Record mine);
  std::string who(Record r) const;
  void log_sector(std::vector<SectorLog>& log, uint32_t& ordinal, uintptr_t p, int64_t& sectors);
  void log_banks(int64_t offset, int bytes);
  // Throws Fault: "[kernel k, block 3, thread 65] <what>".
  [[noreturn]] void fault(const std::string& what) const;
};

// The machine whose kernel runs on this thread of the operating system.
Machine& running_machine();

}  // namespace frit::sim
