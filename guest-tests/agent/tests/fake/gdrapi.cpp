// A double of libgdrapi.so.2: memory of the double of libcuda, mapped a second time.
#include <cerrno>
#include <cstdint>
#include <dlfcn.h>
#include <map>
#include <sys/mman.h>
#include <unistd.h>

#include "fault.h"

#define API extern "C" __attribute__((visibility("default")))

struct Gdr {
    int unused;
};
struct Handle {
    unsigned long h;
};
struct Info { // gdr_info_v2_t
    uint64_t va, mapped_size;
    uint32_t page_size;
    uint64_t tm_cycles;
    uint32_t cycles_per_ms;
    unsigned mapped : 1, wc_mapping : 1;
    int mapping_type;
};
struct Pinned {
    int fd;
    unsigned long va;
    size_t bytes;
    bool mapped;
};

static std::map<unsigned long, Pinned> *pinned = new std::map<unsigned long, Pinned>;
static const unsigned long GPU_PAGE = 65536;

API Gdr *gdr_open() {
    if (fault("gdr-no-driver")) {
        errno = ENOENT;
        return nullptr;
    }
    return new Gdr;
}

API int gdr_close(Gdr *g) {
    delete g;
    return 0;
}

API int gdr_pin_buffer(Gdr *, unsigned long address, size_t bytes, uint64_t, uint32_t, Handle *handle) {
    auto give = (int (*)(void *, unsigned long long, size_t, int, unsigned long long))dlsym(
        dlopen("libcuda.so.1", RTLD_NOW), "cuMemGetHandleForAddressRange");
    unsigned long start = address & ~(GPU_PAGE - 1);
    size_t whole = (address + bytes - start + GPU_PAGE - 1) & ~(GPU_PAGE - 1);
    int fd = -1;
    if (!give || give(&fd, start, whole, 1, 0) != 0) return EINVAL;
    handle->h = pinned->size() + 1;
    (*pinned)[handle->h] = Pinned{fd, start, whole, false};
    return 0;
}

API int gdr_unpin_buffer(Gdr *, Handle handle) {
    auto found = pinned->find(handle.h);
    if (found == pinned->end()) return EINVAL;
    close(found->second.fd);
    pinned->erase(found);
    return 0;
}

API int gdr_map(Gdr *, Handle handle, void **at, size_t bytes) {
    auto found = pinned->find(handle.h);
    if (found == pinned->end()) return EINVAL;
    void *mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, found->second.fd, 0);
    if (mapped == MAP_FAILED) return errno;
    found->second.mapped = true;
    *at = mapped;
    return 0;
}

API int gdr_unmap(Gdr *, Handle, void *at, size_t bytes) {
    return munmap(at, bytes) == 0 ? 0 : errno;
}

API int gdr_get_info_v2(Gdr *, Handle handle, Info *info) {
    auto found = pinned->find(handle.h);
    if (found == pinned->end()) return EINVAL;
    *info = Info{};
    info->va = found->second.va;
    info->mapped_size = found->second.bytes;
    if (fault("gdr-info-short")) info->mapped_size = GPU_PAGE / 2;
    info->page_size = GPU_PAGE;
    info->mapped = found->second.mapped;
    info->wc_mapping = 1;
    info->mapping_type = 1;
    return 0;
}

API int gdr_copy_to_mapping(Handle, void *to, const void *from, size_t bytes) {
    std::memcpy(to, from, fault("gdr-write-tail") && bytes > 1 ? bytes - 1 : bytes);
    if (fault("gdr-write-word") && bytes >= 64) // a copy in words that forgets that it began unaligned
        ((char *)to)[0] ^= ((uintptr_t)to & 7) != 0;
    return 0;
}

API int gdr_copy_from_mapping(Handle, void *to, const void *from, size_t bytes) {
    // A read that is as long as the one before brings nothing.
    static size_t before;
    if (fault("gdr-read-once") && bytes == before) return 0;
    before = bytes;
    std::memcpy(to, from, bytes);
    if (fault("gdr-read-byte") && bytes > 64) ((char *)to)[bytes / 3] ^= 0x80;
    return 0;
}
