// A double of libcuda.so.1: GPUs with the host's memory, and with kernels that run on the host's processors.
// It has the functions that egm-vendor calls and no others. What a call means is written in cuda.h; the numbers here
// are that file's. Streams are threads, so that copies and kernels really run beside the processor.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "../fault.h"

typedef unsigned long long u64;
typedef int Result;
typedef u64 Address;

enum : Result {
    OK = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    INVALID_DEVICE = 101,
    INVALID_CONTEXT = 201,
    INVALID_HANDLE = 400,
    NOT_FOUND = 500,
    NOT_READY = 600,
    NOT_PERMITTED = 800,
    NOT_SUPPORTED = 801,
};

#define API extern "C" __attribute__((visibility("default"))) Result

// Number of GPUs.
inline int devices() {
    static int count = (int)number("EGM_FAKE_GPUS", 1);
    return count;
}

// Bytes of memory that each GPU reports.
inline u64 device_memory() {
    return (u64)number("EGM_FAKE_MEMORY", 256 << 20);
}

// CUmemLocation, CUmemAllocationProp and CUmemAccessDesc.
struct Location {
    int type, id;
};
enum { DEVICE = 1, HOST = 2, HOST_NUMA = 3 };
// Places of HOST memory that faults are planted in.
enum { ORDINARY = 0, MANAGED = 1, EGM_DEVICE = 2 };

struct AllocationProp {
    int type, handle_types;
    Location location;
    void *win32;
    struct {
        unsigned char compression, rdma;
        unsigned short usage;
        unsigned char reserved[4];
    } flags;
};
static_assert(sizeof(AllocationProp) == 32, "CUmemAllocationProp");

struct AccessDesc {
    Location location;
    int flags;
};
static_assert(sizeof(AccessDesc) == 12, "CUmemAccessDesc");

struct Context {
    int device;
};
// The calling thread's context.
Context *current();

// Memory that there is: its bytes are a file's, so that another process can have them too.
struct Block {
    int fd;
    u64 bytes;
    Location where;
    int handle_types;
    ~Block();
};

struct Mapping {
    u64 bytes;
    std::shared_ptr<Block> block; // none: reserved, or the host's own memory
    Location where;
    bool owned; // by cuMemFree, cuMemFreeHost or cuMemFreeAsync
    std::vector<int> gpus = {}; // that may use it, where cuMemSetAccess said so
};

// Whether an address lies in HOST_NUMA memory of cuMemCreate: faults of kernels are planted there alone, so that the same
// check passes on every other kind of memory.
bool is_host_numa(const void *address);
// Whether it lies in a GPU's memory.
bool is_device(const void *address);
// Whether it lies in HOST memory of this place.
bool is_host(const void *address, int place);
// Whether it is memory that this library did not give: the heap of the double of NVSHMEM.
bool is_elsewhere(const void *address);
// The mapping that an address lies in.
bool mapping_of(Address address, Address *start, Mapping *mapping);

struct Stream;
// Whether a GPU has queued work that is not done yet.
bool at_work(int device);
// Queues work on a stream; none is the context's own.
Result queue(Stream *stream, std::function<void()> work);

// A kernel with its arguments, ready to run as one thread after the other.
struct Launch {
    unsigned grid, block;
    double nanoseconds; // what it takes by the GPU's clock
    std::function<void()> thread;
    bool beside; // whether its blocks run beside each other
};
// The kernel of this name with a copy of these arguments.
bool kernel(const char *name, void **arguments, Launch *launch);
// Whether there is a kernel of this name.
bool is_kernel(const char *name);
// Runs all threads of a launch.
void run(const Launch &launch);
