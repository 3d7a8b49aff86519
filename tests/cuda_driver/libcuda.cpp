// A CUDA driver that runs kvsmith's kernels on the CPU: what the program calls of libcuda, for tests of the host
// code on machines without a GPU. It exports what the libcuda of CUDA 12.0 has; the one call that came later ends the
// program if the driver is of an older version, as a missing one does. Environment variables:
//
// - FAKE_CUDA names what goes wrong;
// - FAKE_CUDA_VERSION is the version of CUDA that the driver is of, 13000 for 13.0;
// - FAKE_CUDA_CHIP is the compute capability, 80, 86, 90, 100 or 120, with the limits of that chip;
// - FAKE_CUDA_WRONG is a kernel that computes something else: the last block of every launch does nothing;
// - FAKE_CUDA_REPORT is nvcc's report on the kernels, which has their registers and shared memory;
// - FAKE_CUDA_LOG is a file that gets the kernels of each graph, a line per graph;
// - FAKE_CUDA_MIB is the size of the memory in MiB;
// - FAKE_CUDA_USE is a file that gets, at the end, the most bytes that were allocated and the bytes that were copied to
//   the device.
#include <algorithm>
#include <chrono>
#include <fstream>
#include <mutex>

#include "kvsmith.cu"

// Results of the driver's interface.
enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, STUB = 34, NO_DEVICE = 100, INVALID_IMAGE = 200, NO_BINARY = 209, UNSUPPORTED_PTX = 222, LAUNCH = 719 };

static bool wrong(const char* what) {
    const char* asked = getenv("FAKE_CUDA");
    return asked && std::string(asked) == what;
}

static const char* setting(const char* name) {
    const char* value = getenv(name);
    return value ? value : "";
}

// A chip: shared memory that a block can ask for, and that a multiprocessor has; most threads of a multiprocessor.
struct Chip {
    int major, minor, block_bytes, all_bytes, threads;
};
static Chip chip() {
    std::string name = setting("FAKE_CUDA_CHIP");
    if (name == "80") return {8, 0, 163 << 10, 164 << 10, 2048};
    if (name == "86") return {8, 6, 99 << 10, 100 << 10, 1536};
    if (name == "100") return {10, 0, 227 << 10, 228 << 10, 2048};
    if (name == "120") return {12, 0, 99 << 10, 100 << 10, 1536};
    return {9, 0, 227 << 10, 228 << 10, 2048};
}
// Shared memory that every chip gives to a block that does not ask.
constexpr int UNASKED = 48 << 10;

// What nvcc said of a kernel: registers of a thread, and shared memory of its own arrays.
struct Resources {
    int registers = 32, own_bytes = 0;
};
static std::map<std::string, Resources> read_report() {
    std::ifstream report(setting("FAKE_CUDA_REPORT"));
    std::map<std::string, Resources> out;
    std::string kernel;
    auto number = [](const std::string& line, const char* unit) {
        size_t end = line.find(unit);
        return end == std::string::npos ? 0 : atoi(line.c_str() + line.rfind(' ', end - 1));
    };
    for (std::string line; std::getline(report, line);) {
        size_t name = line.find("Function properties for ");
        if (name != std::string::npos) kernel = line.substr(name + 24);
        else if (line.find(" registers") != std::string::npos) {
            out[kernel] = {number(line, " registers"), number(line, " bytes smem")};
        }
    }
    return out;
}
static Resources resources(const std::string& kernel) {
    static const std::map<std::string, Resources> all = read_report();
    auto found = all.find(kernel);
    return found == all.end() ? Resources() : found->second;
}

static std::recursive_mutex running;
static bool broken = false;

#define CALL(name, ...) extern "C" int name(__VA_ARGS__)

CALL(cuInit, unsigned) { return wrong("no_device") ? NO_DEVICE : wrong("stub") ? STUB : SUCCESS; }
static int cuda_version() {
    const char* said = setting("FAKE_CUDA_VERSION");
    return *said ? atoi(said) : 13000;
}
CALL(cuDriverGetVersion, int* version) { return *version = cuda_version(), SUCCESS; }
CALL(cuDeviceGetCount, int* count) { return *count = wrong("none") ? 0 : 1, SUCCESS; }
CALL(cuDeviceGet, int* device, int) { return *device = 0, SUCCESS; }
CALL(cuDeviceGetName, char* name, int size, int) { return snprintf(name, size, "Fake GPU"), SUCCESS; }
CALL(cuDeviceGetAttribute, int* value, int attribute, int) {
    // The compute capability, the shared memory that a block can ask for, and the processors.
    if (attribute == 75) *value = wrong("old_chip") ? 7 : chip().major;
    else if (attribute == 76) *value = wrong("old_chip") ? 5 : chip().minor;
    else if (attribute == 97) *value = chip().block_bytes;
    else if (attribute == 16) *value = 4;
    else return 1;
    return SUCCESS;
}
CALL(cuDevicePrimaryCtxRetain, void** context, int) { return *context = (void*)8, SUCCESS; }
CALL(cuDevicePrimaryCtxRelease_v2, int) { return SUCCESS; }
CALL(cuCtxSetCurrent, void*) { return SUCCESS; }
static bool runs_on_chip(unsigned compute, bool exactly_major) {
    int major = compute / 10, minor = compute % 10;
    if (major == chip().major) return minor <= chip().minor;
    return !exactly_major && major < chip().major;
}
// What a driver of this version of CUDA says of an image, as far as the image's headers tell. Machine code is taken from
// all compilers of the driver's major version or an older one, which is NVIDIA's minor version compatibility; PTX, which
// the driver compiles, only up to the driver's own version.
static int judge(const unsigned char* image) {
    auto number = [image](size_t at, int bytes) {
        uint64_t value = 0;
        memcpy(&value, image + at, bytes);
        return value;
    };
    // The alignment that the real driver needs.
    if ((uint64_t)image % 8 != 0) return INVALID_IMAGE;
    if (number(0, 4) == 0x464c457f) {
        // CUDA 13 changed the byte of the operating system and the flags; before, the file's version is CUDA's.
        bool is_new = image[7] == 0x41;
        if (!is_new && image[7] != 0x33) return INVALID_IMAGE;
        int major = is_new ? 13 : number(20, 4) / 10;
        if (major > cuda_version() / 1000) return INVALID_IMAGE;
        return runs_on_chip(number(is_new ? 49 : 48, 1), true) ? SUCCESS : NO_BINARY;
    }
    // A fat binary with PTX (kind 1) alone: its version, and the chip that it is for. PTX 8 came with CUDA 12.
    if (number(0, 4) != 0xba55ed50 || number(16, 2) != 1) return INVALID_IMAGE;
    int minor = number(40, 2), major = number(42, 2);
    if ((major + 4) * 1000 + minor * 10 > cuda_version()) return UNSUPPORTED_PTX;
    return runs_on_chip(number(44, 4), false) ? SUCCESS : NO_BINARY;
}
CALL(cuModuleLoadData, void** module, const void* image) {
    if (wrong("no_image")) return NO_BINARY;
    *module = (void*)8;
    return judge((const unsigned char*)image);
}
CALL(cuModuleUnload, void*) { return SUCCESS; }
CALL(cuModuleGetFunction, void** function, void*, const char* name) {
    auto found = emulate::kernels().find(name);
    if (found == emulate::kernels().end()) return 500;
    return *function = (void*)&*found, SUCCESS;
}
// The most dynamic shared memory that was asked for, by kernel.
static std::map<void*, int> asked_bytes;
static std::pair<const std::string, emulate::Kernel>& kernel_of(void* function) {
    return *(std::pair<const std::string, emulate::Kernel>*)function;
}
CALL(cuFuncSetAttribute, void* function, int attribute, int value) {
    if (attribute != 8) return SUCCESS;
    if (value < 0 || value + resources(kernel_of(function).first).own_bytes > chip().block_bytes) return INVALID_VALUE;
    return asked_bytes[function] = value, SUCCESS;
}
CALL(cuFuncGetAttribute, int* value, int attribute, void* function) {
    if (attribute != 1) return INVALID_VALUE;
    return *value = resources(kernel_of(function).first).own_bytes, SUCCESS;
}
// Whether a launch has no more dynamic shared memory than it may.
static bool may_launch(void* function, unsigned shared) {
    auto asked = asked_bytes.find(function);
    int own = resources(kernel_of(function).first).own_bytes;
    return (int)shared <= (asked == asked_bytes.end() ? UNASKED - own : asked->second);
}
CALL(cuOccupancyMaxActiveBlocksPerMultiprocessor, int* blocks, void* function, int threads, size_t shared) {
    if (!may_launch(function, shared)) return INVALID_VALUE;
    Resources used = resources(kernel_of(function).first);
    int by_registers = 65536 / ((used.registers + 7) / 8 * 8 * threads);
    int by_shared = chip().all_bytes / (used.own_bytes + (int)shared + 1024);
    return *blocks = std::min({by_registers, by_shared, chip().threads / threads}), SUCCESS;
}

// What is allocated, and what was. Benchmarks read half of the memory again and again.
struct Memory {
    size_t total, now = 0, most = 0, copied = 0;
    std::map<uint64_t, size_t> sizes;

    Memory() {
        const char* said = getenv("FAKE_CUDA_MIB");
        total = (size_t)(said ? atoi(said) : 256) << 20;
    }
    ~Memory() {
        if (*setting("FAKE_CUDA_USE")) std::ofstream(setting("FAKE_CUDA_USE")) << most << ' ' << copied;
    }
};
static Memory memory;
CALL(cuMemGetInfo_v2, size_t* free, size_t* total) {
    std::lock_guard<std::recursive_mutex> lock(running);
    return *free = memory.total - memory.now, *total = memory.total, SUCCESS;
}
CALL(cuMemAlloc_v2, uint64_t* at, size_t size) {
    std::lock_guard<std::recursive_mutex> lock(running);
    if (wrong("no_memory") && size > 100000) return OUT_OF_MEMORY;
    if (size > memory.total - memory.now) return OUT_OF_MEMORY;
    *at = (uint64_t)memset(malloc(size), 0xff, size);
    memory.now += memory.sizes[*at] = size;
    memory.most = std::max(memory.most, memory.now);
    return SUCCESS;
}

// Page-locked memory and copies in the order of the stream. The host's side of a copy happens as late as the real one
// may: what arrives is there once an event after it was waited for, what leaves is read when the next thing starts.
struct Arriving {
    void* to;
    std::vector<char> bytes;
};
static std::vector<Arriving> arriving;
struct Leaving {
    void* to;
    const void* from;
    size_t size;
};
static std::vector<Leaving> leaving;
static void flush() {
    std::lock_guard<std::recursive_mutex> lock(running);
    for (auto& copy : leaving) memcpy(copy.to, copy.from, copy.size);
    leaving.clear();
}
CALL(cuMemHostAlloc, void** at, size_t size, unsigned) {
    if (wrong("no_pinned")) return OUT_OF_MEMORY;
    return *at = memset(malloc(size), 0xff, size), SUCCESS;
}
CALL(cuMemFreeHost, void* at) { return free(at), SUCCESS; }
CALL(cuMemcpyDtoHAsync_v2, void* to, uint64_t from, size_t size, void*) {
    std::lock_guard<std::recursive_mutex> lock(running);
    flush();
    arriving.push_back({to, std::vector<char>((char*)from, (char*)from + size)});
    return broken ? LAUNCH : SUCCESS;
}
CALL(cuMemcpyHtoDAsync_v2, uint64_t to, const void* from, size_t size, void*) {
    std::lock_guard<std::recursive_mutex> lock(running);
    flush();
    leaving.push_back({(void*)to, from, size});
    memory.copied += size;
    return SUCCESS;
}
// An event: the number of copies that had been asked for, and when it was recorded.
struct Event {
    size_t copies;
    std::chrono::steady_clock::time_point time;
};
CALL(cuEventCreate, Event** event, unsigned) { return *event = new Event(), SUCCESS; }
CALL(cuEventDestroy_v2, Event* event) { return delete event, SUCCESS; }
CALL(cuEventRecord, Event* event, void*) {
    flush();
    return *event = {arriving.size(), std::chrono::steady_clock::now()}, SUCCESS;
}
CALL(cuEventSynchronize, Event* event) {
    std::lock_guard<std::recursive_mutex> lock(running);
    flush();
    for (size_t i = 0; i < event->copies && i < arriving.size(); i++)
        memcpy(arriving[i].to, arriving[i].bytes.data(), arriving[i].bytes.size());
    if (event->copies >= arriving.size()) arriving.clear();
    return event->copies = 0, SUCCESS;
}
CALL(cuEventElapsedTime, float* milliseconds, const Event* start, const Event* end) {
    return *milliseconds = std::chrono::duration<float, std::milli>(end->time - start->time).count(), SUCCESS;
}
CALL(cuMemFree_v2, uint64_t at) {
    std::lock_guard<std::recursive_mutex> lock(running);
    flush();
    auto freed = memory.sizes.find(at);
    if (freed == memory.sizes.end()) return INVALID_VALUE;
    memory.now -= freed->second;
    memory.sizes.erase(freed);
    return free((void*)at), SUCCESS;
}
CALL(cuMemcpyHtoD_v2, uint64_t to, const void* from, size_t size) {
    std::lock_guard<std::recursive_mutex> lock(running);
    memory.copied += size;
    return flush(), memcpy((void*)to, from, size), SUCCESS;
}
CALL(cuMemcpyDtoH_v2, void* to, uint64_t from, size_t size) {
    flush();
    // As the real one does: what went wrong in a kernel is told later.
    return broken ? LAUNCH : (memcpy(to, (void*)from, size), SUCCESS);
}
CALL(cuMemsetD8_v2, uint64_t at, unsigned char byte, size_t size) {
    return flush(), memset((void*)at, byte, size), SUCCESS;
}
// A launch with its arguments.
struct Launch {
    void* function;
    Dim grid;
    unsigned threads, shared;
    std::vector<uint64_t> arguments;

    Launch(void* function, Dim grid, unsigned threads, unsigned shared, void** values)
        : function(function), grid(grid), threads(threads), shared(shared) {
        for (size_t size : kernel().second.sizes) {
            arguments.push_back(0);
            memcpy(&arguments.back(), values[arguments.size() - 1], size);
        }
    }
    std::pair<const std::string, emulate::Kernel>& kernel() const { return kernel_of(function); }
    void start() const {
        std::lock_guard<std::recursive_mutex> lock(running);
        flush();
        broken = wrong("broken");
        emulate::wrong_kernel = setting("FAKE_CUDA_WRONG");
        emulate::most_shared_bytes = asked_bytes.count(function) ? chip().block_bytes : UNASKED;
        emulate::launch(kernel().first, grid, threads, shared, arguments, kernel().second.sizes);
    }
};

CALL(cuLaunchKernel, void* function, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned, unsigned,
     unsigned shared, void*, void** values, void**) {
    if (!may_launch(function, shared)) return INVALID_VALUE;
    Launch(function, {x, y, z}, threads, shared, values).start();
    return SUCCESS;
}

// Graphs: their nodes come one after the other, each after the one before.
struct Node {
    void* function;
    unsigned grid[3], block[3], shared;
    void** values;
};
// Which nodes of the graph that is being made depend on another node: all but the first ones. On chips of 9.0 and later, a
// node can depend on the one before it by an edge across which it may begin before that one has ended.
static std::vector<bool> depends;
CALL(cuGraphCreate, void** graph, unsigned) { return depends.clear(), *graph = new std::vector<Launch>, SUCCESS; }
CALL(cuGraphAddKernelNode_v2, void** node, void* graph, void** before, size_t count, const Node* what) {
    auto& launches = *(std::vector<Launch>*)graph;
    for (size_t i = 0; i < count; i++)
        if ((size_t)before[i] > launches.size()) return INVALID_VALUE;
    if (!may_launch(what->function, what->shared)) return INVALID_VALUE;
    depends.push_back(count > 0);
    launches.emplace_back(what->function, Dim{what->grid[0], what->grid[1], what->grid[2]}, what->block[0], what->shared,
                          what->values);
    return *node = (void*)launches.size(), SUCCESS;
}
CALL(cuGraphAddDependencies_v2, void*, void** from, void** to, const unsigned char* edge, size_t count) {
    if (cuda_version() < 12030) emulate::fail("a driver before CUDA 12.3 has no cuGraphAddDependencies_v2");
    // A programmatic edge from a kernel's programmatic port.
    if (chip().major < 9 || count != 1 || *(size_t*)from + 1 != *(size_t*)to || edge[0] != 1 || edge[2] != 1) return INVALID_VALUE;
    return depends[*(size_t*)to - 1] = true, SUCCESS;
}
CALL(cuGraphInstantiateWithFlags, void** started, void* graph, uint64_t) {
    auto& launches = *(std::vector<Launch>*)graph;
    if (!std::is_sorted(depends.begin(), depends.end())) return INVALID_VALUE;
    std::ofstream log(setting("FAKE_CUDA_LOG"), std::ios::app);
    for (auto& launch : launches) log << launch.kernel().first << ' ';
    log << std::endl;
    return *started = new std::vector<Launch>(launches), SUCCESS;
}
CALL(cuGraphLaunch, void* started, void*) {
    for (auto& launch : *(std::vector<Launch>*)started) launch.start();
    return SUCCESS;
}
CALL(cuGraphExecDestroy, void* started) { return delete (std::vector<Launch>*)started, SUCCESS; }
CALL(cuGraphDestroy, void* graph) { return delete (std::vector<Launch>*)graph, SUCCESS; }
CALL(cuGetErrorName, int error, const char** name) { return *name = error == OUT_OF_MEMORY ? "OUT" : "CUDA_ERROR", SUCCESS; }
CALL(cuGetErrorString, int, const char** text) { return *text = "as the test asked", SUCCESS; }
