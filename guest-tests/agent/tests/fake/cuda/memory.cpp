// Memory of every kind, and what may reach it.
#include <cerrno>
#include <cstdio>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "fake.h"

static const u64 PAGE = 2 << 20;

struct Known {
    std::mutex mutex;
    std::map<Address, Mapping> mappings;
    std::map<u64, std::shared_ptr<Block>> handles;
    u64 next_handle = 1;
    u64 used[64] = {};
};

static Known &known() {
    static Known *all = new Known;
    return *all;
}

Block::~Block() {
    close(fd);
}

bool mapping_of(Address address, Address *start, Mapping *mapping) {
    std::lock_guard<std::mutex> lock(known().mutex);
    auto after = known().mappings.upper_bound(address);
    if (after == known().mappings.begin()) return false;
    auto found = std::prev(after);
    if (address - found->first >= found->second.bytes) return false;
    *start = found->first;
    *mapping = found->second;
    return true;
}

bool is_host_numa(const void *address) {
    Address start;
    Mapping mapping;
    return mapping_of((Address)address, &start, &mapping) && mapping.where.type == HOST_NUMA && !mapping.owned;
}

bool is_device(const void *address) {
    Address start;
    Mapping mapping;
    return mapping_of((Address)address, &start, &mapping) && mapping.where.type == DEVICE;
}

bool is_host(const void *address, int place) {
    Address start;
    Mapping mapping;
    return mapping_of((Address)address, &start, &mapping) && mapping.where.type == HOST && mapping.where.id == place;
}

bool is_elsewhere(const void *address) {
    Address start;
    Mapping mapping;
    return !mapping_of((Address)address, &start, &mapping);
}

static std::shared_ptr<Block> block_of(u64 bytes, Location where, int handle_types) {
    int fd = (int)syscall(SYS_memfd_create, "fake GPU memory", 1u /* MFD_CLOEXEC */);
    if (fd < 0 || ftruncate(fd, (off_t)bytes) != 0) return nullptr;
    return std::shared_ptr<Block>(new Block{fd, bytes, where, handle_types});
}

static Address place(u64 bytes, u64 align) {
    // Room for the alignment, given back around it.
    char *whole = (char *)mmap(nullptr, bytes + align, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (whole == MAP_FAILED) return 0;
    char *start = (char *)(((u64)whole + align - 1) / align * align);
    if (start > whole) munmap(whole, (size_t)(start - whole));
    munmap(start + bytes, (size_t)(whole + align - start));
    return (Address)start;
}

// Memory that is there at once, for the plain allocators.
static Result allocate(Address *address, u64 bytes, Location where) {
    if (!bytes) return INVALID_VALUE;
    u64 whole = (bytes + 4095) / 4096 * 4096;
    auto block = block_of(whole, where, 0);
    Address start = block ? place(whole, PAGE) : 0;
    if (!start) return OUT_OF_MEMORY;
    std::lock_guard<std::mutex> lock(known().mutex);
    if (where.type == DEVICE) {
        if (known().used[where.id] + whole > device_memory()) return munmap((void *)start, whole), OUT_OF_MEMORY;
        known().used[where.id] += whole;
    }
    mmap((void *)start, whole, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, block->fd, 0);
    known().mappings[start] = Mapping{whole, block, where, true};
    *address = start;
    return OK;
}

static Result release(Address address) {
    std::lock_guard<std::mutex> lock(known().mutex);
    auto found = known().mappings.find(address);
    if (found == known().mappings.end() || !found->second.owned) return INVALID_VALUE;
    if (found->second.where.type == DEVICE) known().used[found->second.where.id] -= found->second.bytes;
    munmap((void *)address, found->second.bytes);
    known().mappings.erase(found);
    return OK;
}

API cuMemGetInfo_v2(size_t *free, size_t *total) {
    if (!current()) return INVALID_CONTEXT;
    std::lock_guard<std::mutex> lock(known().mutex);
    *total = device_memory();
    *free = *total - known().used[current()->device];
    return OK;
}

API cuMemAlloc_v2(Address *address, size_t bytes) {
    if (!current()) return INVALID_CONTEXT;
    return allocate(address, bytes, Location{DEVICE, current()->device});
}

API cuMemFree_v2(Address address) {
    return release(address);
}

API cuMemHostAlloc(void **address, size_t bytes, unsigned) {
    return allocate((Address *)address, bytes, Location{HOST, 0});
}

API cuMemFreeHost(void *address) {
    return release((Address)address);
}

API cuMemAllocManaged(Address *address, size_t bytes, unsigned) {
    // A driver gives more than there is free and moves pages; here such a request fails.
    if (!current() || bytes > device_memory() - known().used[current()->device]) return OUT_OF_MEMORY;
    return allocate(address, bytes, Location{HOST, MANAGED});
}

API cuMemHostRegister_v2(void *address, size_t bytes, unsigned flags) {
    if (!address || !bytes) return INVALID_VALUE;
    std::lock_guard<std::mutex> lock(known().mutex);
    int place = flags & 4 /* CU_MEMHOSTREGISTER_IOMEMORY */ ? EGM_DEVICE : ORDINARY;
    known().mappings[(Address)address] = Mapping{bytes, nullptr, Location{HOST, place}, false};
    return OK;
}

API cuMemHostUnregister(void *address) {
    std::lock_guard<std::mutex> lock(known().mutex);
    return known().mappings.erase((Address)address) ? OK : INVALID_VALUE;
}

API cuMemHostGetDevicePointer_v2(Address *address, void *host, unsigned) {
    *address = (Address)host;
    return OK;
}

API cuMemGetAllocationGranularity(size_t *bytes, const AllocationProp *what, int) {
    if (what->location.type == HOST_NUMA && fault("granularity-odd")) return *bytes = 3 << 20, OK;
    if (what->location.type == HOST_NUMA && fault("granularity-zero")) return *bytes = 0, OK;
    *bytes = PAGE;
    return OK;
}

API cuMemCreate(u64 *handle, size_t bytes, const AllocationProp *what, u64) {
    if (!bytes || bytes % PAGE) return INVALID_VALUE;
    if (what->handle_types & 8) return NOT_PERMITTED; // fabric handles need IMEX
    if (what->location.type != DEVICE && what->location.type != HOST_NUMA) return INVALID_VALUE;
    if (what->location.type == HOST_NUMA && (what->location.id != 0 || fault("host-numa-lie"))) return NOT_SUPPORTED;
    if (what->location.type == DEVICE && (what->location.id < 0 || what->location.id >= devices()))
        return INVALID_DEVICE;
    auto block = block_of(bytes, what->location, what->handle_types);
    if (!block) return OUT_OF_MEMORY;
    std::lock_guard<std::mutex> lock(known().mutex);
    if (what->location.type == DEVICE) {
        if (known().used[what->location.id] + bytes > device_memory()) return OUT_OF_MEMORY;
        // Given back with the handle; a mapping that outlives it is not counted.
        known().used[what->location.id] += bytes;
    }
    *handle = known().next_handle++;
    known().handles[*handle] = block;
    return OK;
}

API cuMemRelease(u64 handle) {
    std::lock_guard<std::mutex> lock(known().mutex);
    auto found = known().handles.find(handle);
    if (found == known().handles.end()) return INVALID_VALUE;
    Block &block = *found->second;
    if (block.where.type == DEVICE && block.where.id >= 0) known().used[block.where.id] -= block.bytes;
    known().handles.erase(found);
    return OK;
}

API cuMemAddressReserve(Address *address, size_t bytes, size_t, Address, u64) {
    if (!bytes || bytes % PAGE) return INVALID_VALUE;
    *address = place(bytes, PAGE);
    return *address ? OK : OUT_OF_MEMORY;
}

API cuMemAddressFree(Address address, size_t bytes) {
    return munmap((void *)address, bytes) == 0 ? OK : INVALID_VALUE;
}

API cuMemMap(Address address, size_t bytes, size_t offset, u64 handle, u64) {
    std::lock_guard<std::mutex> lock(known().mutex);
    auto found = known().handles.find(handle);
    if (found == known().handles.end() || offset + bytes > found->second->bytes) return INVALID_VALUE;
    void *at = mmap((void *)address, bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, found->second->fd, (off_t)offset);
    if (at == MAP_FAILED) return OUT_OF_MEMORY;
    known().mappings[address] = Mapping{bytes, found->second, found->second->where, false};
    return OK;
}

API cuMemUnmap(Address address, size_t bytes) {
    Address start;
    Mapping mapping;
    if (!mapping_of(address, &start, &mapping)) return INVALID_VALUE;
    // A real GPU would write to whatever is there next.
    for (int gpu : mapping.gpus) {
        if (!at_work(gpu)) continue;
        std::fprintf(stderr, "memory is unmapped, and GPU %d may still use it\n", gpu);
        std::abort();
    }
    std::lock_guard<std::mutex> lock(known().mutex);
    if (!known().mappings.erase(address)) return INVALID_VALUE;
    void *at = mmap((void *)address, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
    return at == MAP_FAILED ? INVALID_VALUE : OK;
}

API cuMemSetAccess(Address address, size_t bytes, const AccessDesc *who, size_t count) {
    Address start;
    Mapping mapping;
    if (!mapping_of(address, &start, &mapping)) return INVALID_VALUE;
    for (size_t i = 0; i < count; i++) {
        bool peer = who[i].location.type == DEVICE && mapping.where.type == DEVICE &&
                    who[i].location.id != mapping.where.id;
        if (peer && fault("p2p-refused")) return INVALID_DEVICE;
        if (who[i].location.type == DEVICE) mapping.gpus.push_back(who[i].location.id);
    }
    {
        std::lock_guard<std::mutex> lock(known().mutex);
        known().mappings[start].gpus = mapping.gpus;
    }
    return mprotect((void *)address, bytes, PROT_READ | PROT_WRITE) == 0 ? OK : INVALID_VALUE;
}

API cuMemGetAccess(u64 *flags, const Location *, Address address) {
    Address start;
    Mapping mapping;
    if (!mapping_of(address, &start, &mapping)) return INVALID_VALUE;
    *flags = 3;
    return OK;
}

API cuMemRetainAllocationHandle(u64 *handle, void *address) {
    Address start;
    Mapping mapping;
    if (!mapping_of((Address)address, &start, &mapping) || !mapping.block) return INVALID_VALUE;
    std::lock_guard<std::mutex> lock(known().mutex);
    *handle = known().next_handle++;
    known().handles[*handle] = mapping.block;
    return OK;
}

API cuMemExportToShareableHandle(void *shared, u64 handle, int type, u64) {
    std::lock_guard<std::mutex> lock(known().mutex);
    auto found = known().handles.find(handle);
    if (found == known().handles.end()) return INVALID_VALUE;
    if (type != 1 || !(found->second->handle_types & 1)) return NOT_SUPPORTED;
    *(int *)shared = fcntl(found->second->fd, F_DUPFD_CLOEXEC, 3);
    return OK;
}

API cuMemImportFromShareableHandle(u64 *handle, void *shared, int type) {
    if (type != 1) return NOT_SUPPORTED;
    struct stat about;
    int fd = (int)(intptr_t)shared;
    if (fstat(fd, &about) != 0) return INVALID_VALUE;
    std::shared_ptr<Block> block;
    Location elsewhere{HOST_NUMA, -1}; // not counted again as a GPU's
    if (fault("import-other")) {
        block = block_of((u64)about.st_size, elsewhere, 1);
    } else {
        block.reset(new Block{fcntl(fd, F_DUPFD_CLOEXEC, 3), (u64)about.st_size, elsewhere, 1});
    }
    std::lock_guard<std::mutex> lock(known().mutex);
    *handle = known().next_handle++;
    known().handles[*handle] = block;
    return OK;
}

API cuMemGetHandleForAddressRange(void *handle, Address address, size_t bytes, int type, u64 flags) {
    Address start;
    Mapping mapping;
    if (type != 1 || !mapping_of(address, &start, &mapping)) return INVALID_VALUE;
    if (mapping.where.type != DEVICE || !mapping.block || address != start || bytes > mapping.bytes)
        return INVALID_VALUE;
    if (fault("dmabuf-refused")) return NOT_SUPPORTED;
    // A dma-buf that cannot be mapped, as those of drivers before CUDA 13.3.
    if (fault("dmabuf-unmappable") || (fault("dmabuf-by-pcie") && !flags))
        return *(int *)handle = (int)syscall(SYS_eventfd2, 0, O_CLOEXEC), OK;
    // One that fails for another reason: mmap returns EACCES.
    if (fault("dmabuf-shut")) return *(int *)handle = open("/dev/zero", O_WRONLY | O_CLOEXEC), OK;
    // No such answer of a driver that has no dma-bufs, but of one that is broken.
    if (fault("dmabuf-broken")) return 999;
    if (fault("dmabuf-other")) {
        auto other = block_of(mapping.bytes, mapping.where, 0);
        return *(int *)handle = fcntl(other->fd, F_DUPFD_CLOEXEC, 3), OK;
    }
    *(int *)handle = fcntl(mapping.block->fd, F_DUPFD_CLOEXEC, 3);
    return OK;
}

struct Pool {
    Location where;
};
// The first members of CUmemPoolProps.
struct PoolProps {
    int type, handle_types;
    Location location;
};

API cuMemPoolCreate(Pool **pool, const PoolProps *what) {
    if (what->handle_types & 8) return NOT_PERMITTED;
    if (what->location.type == HOST_NUMA && (what->location.id != 0 || fault("host-numa-lie"))) return NOT_SUPPORTED;
    *pool = new Pool{what->location};
    return OK;
}

API cuMemPoolDestroy(Pool *pool) {
    delete pool;
    return OK;
}

API cuMemPoolSetAccess(Pool *, const AccessDesc *, size_t) {
    return OK;
}

API cuMemAllocFromPoolAsync(Address *address, size_t bytes, Pool *pool, Stream *) {
    return allocate(address, bytes, pool->where);
}

API cuMemFreeAsync(Address address, Stream *stream) {
    return queue(stream, [address] { release(address); });
}
