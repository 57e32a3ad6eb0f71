// libfrit_trace.so: records what a GPU does while a program trains, and writes a summary when the program ends. CUDA's
// driver loads it into any program, which needs no change:
//   CUDA_INJECTION64_PATH=build/cuda/libfrit_trace.so FRIT_TRACE=out.json build/cuda/frit train ...
// Environment:
//   FRIT_TRACE          the file to write; without it nothing is recorded
//   FRIT_TRACE_SKIP     updates before the window (50)
//   FRIT_TRACE_STEPS    updates in the window (200)
//   FRIT_TRACE_GRAPHS   nodes: every kernel of a graph is recorded; whole: a graph is one span from its first kernel to
//                       its last, gaps included, which disturbs it less (nodes)
//   FRIT_TRACE_MARKER   a part of the name of a kernel that runs once an update, and (for "whole") outside of graphs
//                       (optimizer_step; for "whole" optimizer_begin)
// The summary's fields: summary.h. Whatever goes wrong is in the summary as "error", and on standard error; the program
// runs on.
#include <cupti.h>
#include <cxxabi.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <mutex>
#include <unordered_map>

#include "tools/trace/summary.h"

namespace {

using namespace frit::trace;

constexpr size_t kBufferBytes = size_t{8} << 20;
constexpr size_t kBufferAlignment = 8;

// "void" and arguments of functions are left out, template arguments are not. Library kernels may have plain C names.
std::string kernel_name(const char* mangled) {
  if (!mangled) return "unknown";
  int status = 0;
  char* demangled = abi::__cxa_demangle(mangled, nullptr, nullptr, &status);
  std::string name = status == 0 && demangled ? demangled : mangled;
  std::free(demangled);
  for (const std::string_view part : {"(anonymous namespace)::", "void "})
    for (size_t at; (at = name.find(part)) != name.npos;) name.erase(at, part.size());
  int depth = 0;
  for (size_t i = 0; i < name.size(); ++i) {
    if (name[i] == '<') ++depth;
    if (name[i] == '>') --depth;
    if (name[i] == '(' && depth == 0) {
      name.resize(i);
      break;
    }
  }
  if (name.size() > 200) name.resize(200);
  return name;
}

const char* memory_name(unsigned kind) {
  switch (kind) {
    case CUPTI_ACTIVITY_MEMORY_KIND_PAGEABLE:
      return "pageable";
    case CUPTI_ACTIVITY_MEMORY_KIND_PINNED:
      return "pinned";
    case CUPTI_ACTIVITY_MEMORY_KIND_DEVICE:
    case CUPTI_ACTIVITY_MEMORY_KIND_DEVICE_STATIC:
      return "device";
    case CUPTI_ACTIVITY_MEMORY_KIND_ARRAY:
      return "array";
    case CUPTI_ACTIVITY_MEMORY_KIND_MANAGED:
    case CUPTI_ACTIVITY_MEMORY_KIND_MANAGED_STATIC:
      return "managed";
    default:
      return "unknown";
  }
}

class Tracer {
 public:
  // One for the process, never destroyed: CUPTI's thread may call until the very end.
  static Tracer& get() {
    static Tracer* tracer = new Tracer;
    return *tracer;
  }

  // Begins to record, if FRIT_TRACE asks for it.
  void begin() {
    const char* path = std::getenv("FRIT_TRACE");
    if (!path || !*path) return;
    path_ = path;
    const auto text = [](const char* name, const char* otherwise) {
      const char* value = std::getenv(name);
      return std::string(value && *value ? value : otherwise);
    };
    window_.skip = std::atoll(text("FRIT_TRACE_SKIP", "50").c_str());
    window_.steps = std::atoll(text("FRIT_TRACE_STEPS", "200").c_str());
    graphs_ = text("FRIT_TRACE_GRAPHS", "nodes");
    window_.marker = text("FRIT_TRACE_MARKER", graphs_ == "whole" ? "optimizer_begin" : "optimizer_step");
    std::atexit([] { get().end(); });
    if (graphs_ != "nodes" && graphs_ != "whole")
      return note("FRIT_TRACE_GRAPHS is " + graphs_ + ", not nodes or whole");
    uint32_t version = 0;
    if (!good(cuptiGetVersion(&version), "cuptiGetVersion")) return;
    version_ = version;
    // Records may grow between minor versions, at their ends; what is read here lies before those.
    if (version / 10000 != CUPTI_API_VERSION / 10000)
      return note("libcupti has version " + std::to_string(version) + ", expected that of CUDA 13, as " +
                  std::to_string(CUPTI_API_VERSION));
    // Buffers are zeroed here, by the thread that has read them, or else CUPTI does it in the thread that trains. If
    // this is refused, CUPTI zeroes them again.
    uint8_t zeroed = 1;
    size_t size = sizeof(zeroed);
    cuptiActivitySetAttribute(CUPTI_ACTIVITY_ATTR_ZEROED_OUT_ACTIVITY_BUFFER, &size, &zeroed);
    // Where the GPU writes times: few large buffers, made before the run.
    size_t bytes = size_t{16} << 20;
    size = sizeof(bytes);
    cuptiActivitySetAttribute(CUPTI_ACTIVITY_ATTR_DEVICE_BUFFER_SIZE, &size, &bytes);
    if (!good(cuptiActivityRegisterCallbacks(&Tracer::requested, &Tracer::completed), "cuptiActivityRegisterCallbacks"))
      return;
    const auto enable = [this](CUpti_ActivityKind kind, const char* what) {
      return good(cuptiActivityEnable(kind), what);
    };
    if (graphs_ == "whole" && !enable(CUPTI_ACTIVITY_KIND_GRAPH_TRACE, "tracing graphs")) return;
    recording_ = enable(CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL, "tracing kernels") &&
                 enable(CUPTI_ACTIVITY_KIND_MEMCPY, "tracing copies") &&
                 enable(CUPTI_ACTIVITY_KIND_MEMCPY2, "tracing copies between GPUs") &&
                 enable(CUPTI_ACTIVITY_KIND_MEMSET, "tracing fills") &&
                 enable(CUPTI_ACTIVITY_KIND_RUNTIME, "tracing the run time's calls") &&
                 enable(CUPTI_ACTIVITY_KIND_DRIVER, "tracing the driver's calls");
  }

 private:
  static void CUPTIAPI requested(uint8_t** buffer, size_t* size, size_t* most) {
    Tracer& t = get();
    *most = 0, *size = kBufferBytes, *buffer = nullptr;
    {
      const std::lock_guard lock(t.buffers_mutex_);
      if (!t.buffers_.empty()) *buffer = t.buffers_.back(), t.buffers_.pop_back();
    }
    if (*buffer) return;
    *buffer = static_cast<uint8_t*>(std::aligned_alloc(kBufferAlignment, kBufferBytes));
    if (*buffer)
      std::memset(*buffer, 0, kBufferBytes);
    else
      *size = 0;  // CUPTI counts what it drops
  }

  static void CUPTIAPI completed(CUcontext, uint32_t, uint8_t* buffer, size_t, size_t valid) {
    Tracer& t = get();
    {
      const std::lock_guard lock(t.mutex_);
      t.read(buffer, valid);
    }
    std::memset(buffer, 0, kBufferBytes);
    const std::lock_guard lock(t.buffers_mutex_);
    t.buffers_.push_back(buffer);
  }

  void read(uint8_t* buffer, size_t valid) {
    CUpti_Activity* record = nullptr;
    if (valid > 0)
      while (cuptiActivityGetNextRecord(buffer, valid, &record) == CUPTI_SUCCESS) add(*record);
    size_t dropped = 0;
    if (cuptiActivityGetNumDroppedRecords(nullptr, 0, &dropped) == CUPTI_SUCCESS) dropped_ += dropped;
  }

  void add(const CUpti_Activity& record) {
    const auto as = [&]<typename T>(const T*) -> const T& { return reinterpret_cast<const T&>(record); };
    switch (record.kind) {
      case CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL:
      case CUPTI_ACTIVITY_KIND_KERNEL: {
        const auto& k = as(static_cast<const CUpti_ActivityKernel10*>(nullptr));
        const uint32_t name = kernel_id(k.name);
        if (span(k.start, k.end, 0, name, Kind::kKernel) && markers_[name]) marked(k.end);
        break;
      }
      case CUPTI_ACTIVITY_KIND_GRAPH_TRACE: {
        const auto& g = as(static_cast<const CUpti_ActivityGraphTrace2*>(nullptr));
        span(g.start, g.end, 0, id("graph"), Kind::kGraph);
        break;
      }
      case CUPTI_ACTIVITY_KIND_MEMCPY: {
        const auto& c = as(static_cast<const CUpti_ActivityMemcpy6*>(nullptr));
        span(c.start, c.end, c.bytes, id(std::string(memory_name(c.srcKind)) + " to " + memory_name(c.dstKind)),
             Kind::kCopy);
        break;
      }
      case CUPTI_ACTIVITY_KIND_MEMCPY2: {
        const auto& c = as(static_cast<const CUpti_ActivityMemcpyPtoP4*>(nullptr));
        span(c.start, c.end, c.bytes, id("device to another device"), Kind::kCopy);
        break;
      }
      case CUPTI_ACTIVITY_KIND_MEMSET: {
        const auto& m = as(static_cast<const CUpti_ActivityMemset4*>(nullptr));
        span(m.start, m.end, m.bytes, id(memory_name(m.memoryKind)), Kind::kFill);
        break;
      }
      case CUPTI_ACTIVITY_KIND_RUNTIME:
      case CUPTI_ACTIVITY_KIND_DRIVER: {
        const auto& c = as(static_cast<const CUpti_ActivityAPI*>(nullptr));
        if (c.start > forget_after_) break;
        records_.calls.push_back({c.start, c.end ? c.end : c.start, call_id(record.kind, c.cbid)});
        break;
      }
      default:
        break;
    }
  }

  // False if it has no times, which is counted, or lies behind the window.
  bool span(uint64_t begin, uint64_t end, uint64_t bytes, uint32_t name, Kind kind) {
    if (begin == 0 || end == 0) {
      ++untimed_;
      return false;
    }
    if (begin > forget_after_) return false;
    records_.spans.push_back({begin, end, bytes, name, kind});
    return true;
  }

  // Once the window is whole, later records are not kept. A second more is, as buffers come in no fixed order.
  void marked(uint64_t end) {
    last_marker_ = std::max(last_marker_, end);
    if (++marked_ == window_.skip + window_.steps) forget_after_ = last_marker_ + 1000000000;
  }

  uint32_t id(const std::string& name) {
    const auto [at, added] = ids_.emplace(name, static_cast<uint32_t>(records_.names.size()));
    if (added) {
      records_.names.push_back(name);
      markers_.push_back(contains(name, window_.marker));
    }
    return at->second;
  }
  uint32_t kernel_id(const char* mangled) {
    const auto [at, added] = kernels_.emplace(mangled ? mangled : "", 0);
    if (added) at->second = id(kernel_name(mangled));
    return at->second;
  }
  uint32_t call_id(CUpti_ActivityKind kind, uint32_t cbid) {
    const auto [at, added] = calls_.emplace(std::pair(kind, cbid), 0);
    if (added) {
      const auto domain = kind == CUPTI_ACTIVITY_KIND_DRIVER ? CUPTI_CB_DOMAIN_DRIVER_API : CUPTI_CB_DOMAIN_RUNTIME_API;
      const char* name = nullptr;
      const bool known = cuptiGetCallbackName(domain, cbid, &name) == CUPTI_SUCCESS && name;
      at->second =
          id(known ? plain_call_name(name)
                   : (kind == CUPTI_ACTIVITY_KIND_DRIVER ? "driver call " : "run time call ") + std::to_string(cbid));
    }
    return at->second;
  }

  // Keeps the first thing that went wrong.
  void note(const std::string& what) {
    if (error_.empty()) error_ = what;
    std::fprintf(stderr, "frit_trace: %s\n", what.c_str());
  }
  bool good(CUptiResult result, const char* what) {
    if (result == CUPTI_SUCCESS) return true;
    const char* text = nullptr;
    cuptiGetResultString(result, &text);
    note(std::string(what) + ": " + (text ? text : "unknown error"));
    return false;
  }

  // At the process's exit.
  void end() {
    if (recording_) {
      recording_ = false;
      good(cuptiActivityFlushAll(CUPTI_ACTIVITY_FLAG_FLUSH_FORCED), "cuptiActivityFlushAll");
    }
    try {
      write();
    } catch (const std::exception& e) {
      std::fprintf(stderr, "frit_trace: %s\n", e.what());
    }
  }

  void write() {
    const std::lock_guard lock(mutex_);
    nlohmann::ordered_json out = {
        {"what", "GPU work and calls of the host, recorded through CUPTI"}, {"cupti", version_}, {"graph_records", graphs_}};
    out.update(summarise(std::move(records_), window_));
    out["dropped"] = dropped_, out["untimed"] = untimed_;
    if (!error_.empty()) out["error"] = error_;
    const std::string temporary = path_ + ".tmp";
    std::ofstream file(temporary);
    file << out.dump(1, ' ', false, nlohmann::ordered_json::error_handler_t::replace) << '\n';
    file.close();
    if (!file || std::rename(temporary.c_str(), path_.c_str()) != 0) {
      std::fprintf(stderr, "frit_trace: cannot write %s\n", path_.c_str());
      return;
    }
    if (out.contains("error"))
      std::fprintf(stderr, "frit_trace: %s: %s\n", path_.c_str(), out["error"].get<std::string>().c_str());
    else
      std::fprintf(stderr, "frit_trace: wrote %s: the GPU was busy for %.2f %% of %.3f s\n", path_.c_str(),
                   100 * out["busy_share"].get<double>(), out["wall_us"].get<double>() / 1e6);
  }

  std::string path_, graphs_, error_;
  uint32_t version_ = 0;
  Window window_;
  bool recording_ = false;

  std::mutex mutex_;  // of all below, but the buffers
  Records records_;
  std::unordered_map<std::string, uint32_t> ids_, kernels_;
  std::map<std::pair<CUpti_ActivityKind, uint32_t>, uint32_t> calls_;
  std::vector<bool> markers_;  // by id
  int64_t marked_ = 0;
  uint64_t last_marker_ = 0, forget_after_ = ~uint64_t{0};
  size_t dropped_ = 0, untimed_ = 0;

  std::mutex buffers_mutex_;
  std::vector<uint8_t*> buffers_;
};

}  // namespace

// CUDA's driver calls this when it is initialised. 1: it may go on.
extern "C" __attribute__((visibility("default"))) int InitializeInjection() {
  try {
    Tracer::get().begin();
  } catch (const std::exception& e) {
    std::fprintf(stderr, "frit_trace: %s\n", e.what());
  }
  return 1;
}
