// The GPUs and their attributes: an H200 of driver 580 in a guest, but for its size.
#include <cstdio>

#include "fake.h"

API cuInit(unsigned) {
    if (fault("init-broken")) return 999;
    return devices() > 0 ? OK : 100;
}

API cuDriverGetVersion(int *version) {
    *version = 13000;
    return OK;
}

API cuDeviceGetCount(int *count) {
    *count = devices();
    return OK;
}

API cuDeviceGet(int *device, int ordinal) {
    if (ordinal < 0 || ordinal >= devices()) return INVALID_DEVICE;
    *device = ordinal;
    return OK;
}

API cuDeviceGetName(char *name, int length, int) {
    std::snprintf(name, (size_t)length, "Double GPU");
    return OK;
}

API cuDeviceGetPCIBusId(char *id, int length, int device) {
    std::snprintf(id, (size_t)length, "0000:%02x:00.0", 0xe0 + device);
    return OK;
}

API cuDeviceTotalMem_v2(size_t *bytes, int) {
    *bytes = device_memory();
    return OK;
}

API cuDeviceGetAttribute(int *value, int attribute, int device) {
    if (device < 0 || device >= devices()) return INVALID_DEVICE;
    static const std::map<int, int> says = {
        {10, 1},  // threads of a warp
        {16, 2},  // multiprocessors
        {38, 1 << 20},  // L2 cache
        {41, 1},  // unified addressing
        {75, 9},  {76, 0},  // compute capability
        {83, 1},  // managed memory
        {88, 0},  {89, 1},  {99, 1},  {100, 0},  // pageable access, concurrent managed access, host register
        {102, 1}, // virtual memory management
        {103, 1}, // handles as file descriptors
        {110, 1}, {115, 1}, {116, 1}, {117, 1}, {118, 100}, {119, 1},
        {124, 1}, // dma-buf
        {128, 1}, {132, 0}, {134, 0}, {141, 1}, {142, 1}, {143, 0},
    };
    auto found = says.find(attribute);
    *value = found == says.end() ? 0 : found->second;
    if (attribute == 88) *value = (int)number("EGM_FAKE_PAGEABLE", 0);
    if (attribute == 134 && fault("numa-node-wrong")) *value = 7;
    if (attribute == 134 && fault("numa-node-none")) *value = -1;
    return OK;
}

API cuDeviceCanAccessPeer(int *can, int device, int peer) {
    *can = device != peer;
    return OK;
}

API cuDeviceGetP2PAttribute(int *value, int attribute, int, int) {
    // Rank, access, native atomics, arrays.
    *value = attribute == 1 ? 0 : 1;
    return OK;
}

API cuPointerGetAttribute(void *value, int attribute, Address address) {
    Address start;
    Mapping mapping;
    if (!mapping_of(address, &start, &mapping)) return INVALID_VALUE;
    if (attribute == 2) *(unsigned *)value = mapping.where.type == DEVICE ? 2 : 1;
    else if (attribute == 9) *(int *)value = mapping.where.type == DEVICE ? mapping.where.id : 0;
    else return INVALID_VALUE;
    return OK;
}
