// The simulator's threads: fibers, barriers and warp collectives.
#include <algorithm>
#include <bit>

#include <cstring>
#include <string_view>
#include <utility>

#include "frit/backend/sim/internal.h"
#include "frit/core/error.h"

namespace frit::sim {

namespace {

[[gnu::tls_model("initial-exec")]] constinit thread_local Machine* machine_of_thread = nullptr;

std::string lanes_text(uint32_t mask) {
  std::string text;
  int count = 0;
  for (int lane = 0; lane < 32; ++lane) {
    if (!(mask >> lane & 1)) continue;
    if (++count > 4) continue;
    text += (text.empty() ? "" : ", ") + std::to_string(lane);
  }
  if (count > 4) text += fmt::format(" and {} more", count - 4);
  return (count == 1 ? "lane " : "lanes ") + text;
}

std::string place_text(const std::source_location& where) {
  const std::string_view file = where.file_name();
  const size_t root = file.rfind("frit/");
  return fmt::format("{} line {}", file.substr(root == std::string_view::npos ? 0 : root), where.line());
}

}  // namespace

[[gnu::tls_model("initial-exec")]] constinit thread_local const Place* detail::place_of_thread = nullptr;

Machine& running_machine() {
  return *machine_of_thread;
}

void Machine::launch() {
  Machine* outer = machine_of_thread;
  machine_of_thread = this;
  error = nullptr;
  block_serials.clear();
  launch_floor = static_cast<Record>(serial + 1) << kSerialShift;
  blocks_done = 0, most_barriers = 0;
  begin_block();
  enter_main();
  switch_to(free_fiber());
  detail::place_of_thread = nullptr;
  machine_of_thread = outer;
  if (error) {
    reset_fibers();
    std::exception_ptr thrown = std::exchange(error, nullptr);
    std::rethrow_exception(thrown);
  }
}

void Machine::next_serial() {
  if (serial == 0xffffffffu) fault("the launch has more than 4 billion barriers and blocks");
  ++serial;
  lane_set_count = 32;
}

void Machine::begin_block() {
  next_serial();
  block_floor = static_cast<Record>(serial) << kSerialShift;
  block_serials.push_back(serial);
  block = order == Order::kForward ? blocks_done : blocks - 1 - blocks_done;
  fresh = ended = at_barrier = 0;
  ready_head = ready_tail = 0;
  joined = false, releases = 0, block_barriers = 0;
  const int warp_total = (thread_total + 31) / 32;
  for (int w = 0; w < warp_total; ++w) {
    Warp& warp = warps[static_cast<size_t>(w)];
    const int lanes = std::min(32, thread_total - w * 32);
    warp.lanes = lanes == 32 ? 0xffffffffu : (1u << lanes) - 1;
    warp.ended = warp.at_barrier = 0;
    warp.time = warp.ordered_at = 0, warp.partial = false;
    warp.meetings = 0;
    if (warp.free_slots.size() != warp.all_slots.size()) {
      warp.free_slots.clear();
      for (auto& slots : warp.all_slots) slots->holders = 0, warp.free_slots.push_back(slots.get());
    }
    ++warp.generation;
  }
}

bool Machine::next_block() {
  most_barriers = std::max(most_barriers, block_barriers);
  if (++blocks_done == blocks) return false;
  begin_block();
  return true;
}

// Makes the next thread that never ran the current one.
void Machine::start_thread() {
  Thread& t = threads[static_cast<size_t>(fresh++)];
  t.place.threads = thread_total, t.place.block = block, t.place.blocks = blocks;
  t.slots = nullptr;
  t.waited = false;
  t.copies.clear(), t.groups.clear();
  current = &t;
  detail::place_of_thread = &t.place;
}

void Machine::end_thread() {
  Thread& t = *current;
  Warp& warp = *t.warp;
  if (at_barrier) {
    fault(fmt::format("ends, while {} of {} threads wait at the barrier() of {} (first thread {})", at_barrier,
                      thread_total, place_text(barrier_where), barrier_first->place.thread));
  }
  for (int i = 0; i < warp.meetings; ++i)
    if (warp.meeting[i].mask & t.bit)
      fault(fmt::format("ends, while {} of its warp wait for it at {}", lanes_text(warp.meeting[i].arrived),
                        warp.meeting[i].what));
  warp.ended |= t.bit;
  ++ended;
}

// What each fiber does: runs threads that never ran, one after the other, and lets waiting ones go on on theirs.
void Machine::run_threads() {
  for (;;) {
    start_thread();
    try {
      body.run(body.arguments.get());
      end_thread();
    } catch (...) {
      error = std::current_exception();
    }
    if (!error && ready_head == ready_tail && fresh == thread_total && ended != thread_total) {
      try {
        fault("ends, and no thread of the block can go on: " + waiting());
      } catch (...) {
        error = std::current_exception();
      }
    }
    if (error) {
      switch_to(main);  // never comes back: launch() drops the stacks
    } else if (ready_head != ready_tail) {
      Thread& t = threads[ready[ready_head++ & 1023]];
      free_fibers.push_back(running);
      current = &t;
      detail::place_of_thread = &t.place;
      switch_to(*t.fiber);
    } else if (fresh == thread_total && !next_block()) {
      free_fibers.push_back(running);
      switch_to(main);
    }
  }
}

// The current thread waits until somebody makes it ready.
void Machine::suspend() {
  Thread& me = *current;
  me.fiber = running;
  if (ready_head != ready_tail) {
    Thread& t = threads[ready[ready_head++ & 1023]];
    current = &t;
    detail::place_of_thread = &t.place;
    switch_to(*t.fiber);
  } else if (fresh < thread_total) {
    switch_to(free_fiber());
  } else {
    fault("waits, and no thread of the block can go on: " + waiting());
  }
}

std::string Machine::waiting() const {
  std::string text;
  const auto add = [&](const std::string& piece) { text += (text.empty() ? "" : "; ") + piece; };
  int listed = 0;
  for (int w = 0; w * 32 < thread_total; ++w) {
    const Warp& warp = warps[static_cast<size_t>(w)];
    if (++listed > 4) {
      add("and so on");
      break;
    }
    if (warp.ended) add(fmt::format("warp {}: {} ended", w, lanes_text(warp.ended)));
    if (warp.at_barrier) add(fmt::format("warp {}: {} at barrier()", w, lanes_text(warp.at_barrier)));
    for (int i = 0; i < warp.meetings; ++i)
      add(fmt::format("warp {}: {} at {}(mask {:#010x})", w, lanes_text(warp.meeting[i].arrived), warp.meeting[i].what,
                      warp.meeting[i].mask));
  }
  return text;
}

void wait_for_previous() {
  running_machine().current->waited = true;
}
void join_after_all_blocks() {
  running_machine().joined = true;
}
void release_to_last_block() {
  Machine& m = running_machine();
  if (m.releases < kMaxRelease) ++m.releases;
}

void barrier(const std::source_location& where) {
  Machine& m = running_machine();
  Thread& me = *m.current;
  Warp& warp = *me.warp;
  for (int i = 0; i < warp.meetings; ++i)
    if (warp.meeting[i].mask & me.bit)
      m.fault(fmt::format("comes to barrier(), while {} of its warp wait for it at {}",
                          lanes_text(warp.meeting[i].arrived), warp.meeting[i].what));
  if (m.ended)
    m.fault(fmt::format("waits at the barrier() of {}, but {} of {} threads have ended", place_text(where), m.ended,
                        m.thread_total));
  if (m.at_barrier == 0) {
    m.barrier_first = &me, m.barrier_where = where;
  } else if (where.line() != m.barrier_where.line() ||
             (where.file_name() != m.barrier_where.file_name() &&
              std::string_view(where.file_name()) != m.barrier_where.file_name())) {
    m.fault(fmt::format("comes to the barrier() of {}, while {} of {} threads wait at that of {} (first thread {})",
                        place_text(where), m.at_barrier, m.thread_total, place_text(m.barrier_where),
                        m.barrier_first->place.thread));
  }
  if (++m.at_barrier < m.thread_total) {
    warp.at_barrier |= me.bit;
    m.suspend();
    return;
  }
  m.at_barrier = 0;
  ++m.block_barriers;
  m.next_serial();
  for (int w = 0; w * 32 < m.thread_total; ++w) {
    Warp& other = m.warps[static_cast<size_t>(w)];
    other.at_barrier = 0;
    other.time = other.ordered_at = 0, other.partial = false;
    ++other.generation;
  }
  for (int t = 0; t < m.thread_total; ++t)
    if (t != me.place.thread) m.make_ready(m.threads[static_cast<size_t>(t)]);
}

void Machine::complete_warp_barrier(Warp& warp, uint32_t mask) {
  if (warp.time == kMaxTime) fault(fmt::format("passes more than {} warp barriers without a block barrier", kMaxTime));
  ++warp.time;
  if (mask == warp.lanes) {
    warp.ordered_at = warp.time, warp.partial = false;
    return;
  }
  if (!warp.partial) {
    for (auto& row : warp.knows)
      for (auto& time : row) time = static_cast<uint16_t>(warp.ordered_at);
    warp.partial = true;
  }
  uint16_t joint[32] = {};
  for (int lane = 0; lane < 32; ++lane)
    if (mask >> lane & 1)
      for (int other = 0; other < 32; ++other) joint[other] = std::max(joint[other], warp.knows[lane][other]);
  for (int lane = 0; lane < 32; ++lane)
    if (mask >> lane & 1) joint[lane] = static_cast<uint16_t>(warp.time);
  for (int lane = 0; lane < 32; ++lane)
    if (mask >> lane & 1) std::copy(joint, joint + 32, warp.knows[lane]);
}

namespace {
constexpr const char* kWarpBarrier = "warp_barrier";
}

// The current lane comes to a collective, and goes on when all lanes of the mask have.
void Machine::meet(uint32_t mask, const char* what, const void* value, int bytes) {
  Thread& me = *current;
  Warp& warp = *me.warp;
  if (!(mask & me.bit)) [[unlikely]]
    fault(
        fmt::format("calls {} with the mask {:#010x}, which lacks its own lane {}", what, mask, me.place.thread & 31));
  Meeting* meeting = nullptr;
  for (int i = 0; i < warp.meetings; ++i) {
    Meeting& other = warp.meeting[i];
    if (other.mask != mask) {
      // Lanes that wait for this one, and that it would wait for at another place. The others may come later, both
      // ways.
      if (!(other.mask & me.bit) || !(other.arrived & mask)) continue;
      fault(fmt::format(
          "comes to {} with the mask {:#010x}, while {} of its warp wait for it at {} with the mask {:#010x}", what,
          mask, lanes_text(other.arrived), other.what, other.mask));
    }
    if ((other.what != what && std::string_view(other.what) != what) || other.bytes != bytes)
      fault(fmt::format("comes to {} of {} bytes, while {} of its warp wait for it at {} of {} bytes", what, bytes,
                        lanes_text(other.arrived), other.what, other.bytes));
    meeting = &other;
  }
  if (!meeting) {
    if (mask & ~warp.lanes)
      fault(fmt::format(
          "calls {} with the mask {:#010x}: the mask names lanes that do not exist in a block of {} threads", what,
          mask, thread_total));
    if (mask & warp.ended)
      fault(fmt::format("waits at {} for {} of its warp, which ended", what, lanes_text(mask & warp.ended)));
    if (mask & warp.at_barrier)
      fault(fmt::format("waits at {} for {} of its warp, which wait at barrier()", what,
                        lanes_text(mask & warp.at_barrier)));
    meeting = &warp.meeting[warp.meetings++];
    *meeting = {mask, 0, what, bytes, nullptr};
    if (bytes) {
      if (warp.free_slots.empty()) {
        warp.all_slots.push_back(std::make_unique<Slots>());
        warp.free_slots.push_back(warp.all_slots.back().get());
      }
      meeting->slots = warp.free_slots.back();
      warp.free_slots.pop_back();
      meeting->slots->holders = std::popcount(mask);
    }
  }
  if (bytes) {
    if (me.slots && --me.slots->holders == 0) warp.free_slots.push_back(me.slots);
    me.slots = meeting->slots;
    std::memcpy(me.slots->lanes[me.place.thread & 31].bytes, value, static_cast<size_t>(bytes));
  }
  meeting->arrived |= me.bit;
  if (meeting->arrived != mask) return suspend();
  *meeting = warp.meeting[--warp.meetings];
  ++counts.collectives;
  if (mask == warp.lanes) ++warp.generation;
  if (bytes == 0) complete_warp_barrier(warp, mask);
  const int base = warp.index * 32;
  for (uint32_t others = mask & ~me.bit; others; others &= others - 1)
    make_ready(threads[static_cast<size_t>(base + std::countr_zero(others))]);
}

void warp_barrier(uint32_t mask) {
  running_machine().meet(mask, kWarpBarrier, nullptr, 0);
}

const Slot* gather(uint32_t mask, const char* what, const void* value, int bytes) {
  Machine& m = running_machine();
  m.meet(mask, what, value, bytes);
  return m.current->slots->lanes;
}

void source_not_in_mask(int from, uint32_t mask) {
  running_machine().fault(fmt::format("takes the value of lane {}, which is not in the mask {:#010x}", from, mask));
}

}  // namespace frit::sim
