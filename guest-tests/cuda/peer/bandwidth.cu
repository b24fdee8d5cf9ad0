// What egm-guest's figures are held against: the same quantities by a plain program of CUDA's runtime interface, which has
// no line in common with it. `beside` builds and runs it.
//
// Prints JSON: {"device": …, "figures": [{"series", "bytes", "value", "unit"}, …]}, each the median of nine rounds after
// two that do not count. Names of series are egm-guest's.

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include <cuda.h>
#include <cuda_runtime.h>
#include <dlfcn.h>

#define CHECK(call)                                                                                            \
    do {                                                                                                       \
        auto result = (call);                                                                                  \
        if (int(result) != 0) {                                                                                \
            fprintf(stderr, "%s:%d: %s: error %d\n", __FILE__, __LINE__, #call, int(result));                  \
            exit(1);                                                                                           \
        }                                                                                                      \
    } while (0)

static const size_t SIZES[] = {size_t(64) << 20, size_t(256) << 20, size_t(1) << 30};
static const size_t LARGEST = size_t(1) << 30;
static const size_t CHAIN = size_t(256) << 20;

static bool first_figure = true;

static void figure(const std::string &series, size_t bytes, std::vector<double> rounds, const char *unit) {
    std::sort(rounds.begin(), rounds.end());
    printf("%s\n  {\"series\": \"%s\", \"bytes\": %zu, \"value\": %.6g, \"unit\": \"%s\"}", first_figure ? "" : ",",
           series.c_str(), bytes, rounds[rounds.size() / 2], unit);
    first_figure = false;
}

__global__ void read_all(const uint4 *from, size_t count, unsigned *out) {
    unsigned mixed = 0;
    size_t step = size_t(gridDim.x) * blockDim.x;
#pragma unroll 4
    for (size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += step) {
        uint4 v = from[i];
        mixed ^= v.x ^ v.y ^ v.z ^ v.w;
    }
    if (mixed == 0x12345678) // the compiler must not know that nobody needs it
        *out = mixed;
}

__global__ void write_all(uint4 *to, size_t count, unsigned value) {
    size_t step = size_t(gridDim.x) * blockDim.x;
    for (size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += step)
        to[i] = make_uint4(value, value, value, unsigned(i));
}

__global__ void copy_all(uint4 *to, const uint4 *from, size_t count) {
    size_t step = size_t(gridDim.x) * blockDim.x;
#pragma unroll 4
    for (size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += step)
        to[i] = from[i];
}

__global__ void chase(const unsigned *chain, unsigned steps, unsigned *at) {
    unsigned here = *at;
    for (unsigned i = 0; i < steps; i++)
        here = chain[here];
    *at = here;
}

static int blocks() {
    cudaDeviceProp properties;
    int device;
    CHECK(cudaGetDevice(&device));
    CHECK(cudaGetDeviceProperties(&properties, device));
    return properties.multiProcessorCount * 4;
}

// Seconds of nine rounds of `work` on `main` (and `side`, started with it), after two.
static std::vector<double> rounds(cudaStream_t main, cudaStream_t side, std::function<void()> work) {
    cudaEvent_t begin, end, joined;
    CHECK(cudaEventCreate(&begin));
    CHECK(cudaEventCreate(&end));
    int device = 0, other = 0;
    CHECK(cudaGetDevice(&device));
    if (side) {
        CHECK(cudaStreamGetDevice(side, &other));
        CHECK(cudaSetDevice(other));
        CHECK(cudaEventCreateWithFlags(&joined, cudaEventDisableTiming));
        CHECK(cudaSetDevice(device));
    }
    std::vector<double> seconds;
    for (int round = 0; round < 11; round++) {
        CHECK(cudaEventRecord(begin, main));
        if (side)
            CHECK(cudaStreamWaitEvent(side, begin, 0));
        work();
        if (side) {
            CHECK(cudaEventRecord(joined, side));
            CHECK(cudaStreamWaitEvent(main, joined, 0));
        }
        CHECK(cudaEventRecord(end, main));
        CHECK(cudaEventSynchronize(end));
        float milliseconds;
        CHECK(cudaEventElapsedTime(&milliseconds, begin, end));
        if (round >= 2)
            seconds.push_back(milliseconds / 1e3);
    }
    return seconds;
}

static void bandwidth(const std::string &series, size_t bytes, int directions, cudaStream_t main, cudaStream_t side,
                      std::function<void()> work) {
    int repeats = int(std::max<size_t>(1, (size_t(256) << 20) / bytes));
    auto seconds = rounds(main, side, [&] {
        for (int i = 0; i < repeats; i++)
            work();
    });
    for (double &s : seconds)
        s = double(bytes) * repeats * directions / s / 1e9;
    figure(series, bytes, seconds, "GB/s");
}

// `scratch` is of the memory's own GPU: writing it leaves nothing of the chain in that one's cache.
static void latency(const std::string &series, void *memory, size_t bytes, void *scratch, cudaStream_t stream) {
    const size_t apart = 512, links = bytes / apart, steps = 8192;
    std::vector<unsigned> order(links), chain(links * apart / 4);
    std::iota(order.begin(), order.end(), 0u);
    std::shuffle(order.begin(), order.end(), std::mt19937(42));
    for (size_t i = 0; i < links; i++)
        chain[order[i] * (apart / 4)] = unsigned(order[(i + 1) % links] * (apart / 4));
    CHECK(cudaMemcpy(memory, chain.data(), links * apart, cudaMemcpyDefault));
    unsigned *at;
    CHECK(cudaMalloc(&at, 4));
    CHECK(cudaMemset(at, 0, 4));
    CHECK(cudaMemset(scratch, 0, LARGEST));
    CHECK(cudaDeviceSynchronize());
    auto seconds = rounds(stream, nullptr, [&] { chase<<<1, 1, 0, stream>>>((const unsigned *)memory, steps, at); });
    CHECK(cudaGetLastError());
    for (double &s : seconds)
        s = s * 1e9 / steps;
    figure(series + ": latency", bytes, seconds, "ns");
    CHECK(cudaFree(at));
}

// Memory of a host's NUMA node by cuMemCreate, for the GPU and processors.
static void *host_numa(size_t bytes, int node, int device) {
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    auto create = (decltype(&cuMemCreate))dlsym(library, "cuMemCreate");
    auto reserve = (decltype(&cuMemAddressReserve))dlsym(library, "cuMemAddressReserve");
    auto map = (decltype(&cuMemMap))dlsym(library, "cuMemMap");
    auto access = (decltype(&cuMemSetAccess))dlsym(library, "cuMemSetAccess");
    CUmemAllocationProp wanted = {};
    wanted.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    wanted.location.type = CU_MEM_LOCATION_TYPE_HOST_NUMA;
    wanted.location.id = node;
    CUmemGenericAllocationHandle handle;
    CUdeviceptr address;
    CHECK(create(&handle, bytes, &wanted, 0));
    CHECK(reserve(&address, bytes, 0, 0, 0));
    CHECK(map(address, bytes, 0, handle, 0));
    CUmemAccessDesc who[2] = {};
    who[0].location = wanted.location;
    who[1].location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    who[1].location.id = device;
    who[0].flags = who[1].flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    CHECK(access(address, bytes, who, 2));
    return (void *)address;
}

static void with_host(const std::string &kind, void *host, void *host2, void *device, void *device2) {
    cudaStream_t main, side;
    CHECK(cudaStreamCreateWithFlags(&main, cudaStreamNonBlocking));
    CHECK(cudaStreamCreateWithFlags(&side, cudaStreamNonBlocking));
    unsigned *out;
    CHECK(cudaMalloc(&out, 4));
    int grid = blocks();
    for (size_t bytes : SIZES) {
        size_t count = bytes / sizeof(uint4);
        auto to = [&] { CHECK(cudaMemcpyAsync(device, host, bytes, cudaMemcpyHostToDevice, main)); };
        auto from = [&](cudaStream_t stream) {
            CHECK(cudaMemcpyAsync(host2, device2, bytes, cudaMemcpyDeviceToHost, stream));
        };
        bandwidth(kind + ": copy engine to GPU", bytes, 1, main, nullptr, to);
        bandwidth(kind + ": copy engine from GPU", bytes, 1, main, nullptr, [&] { from(main); });
        bandwidth(kind + ": copy engine both ways", bytes, 2, main, side, [&] { to(); from(side); });
        bandwidth(kind + ": SM read", bytes, 1, main, nullptr,
                  [&] { read_all<<<grid, 256, 0, main>>>((uint4 *)host, count, out); });
        bandwidth(kind + ": SM write", bytes, 1, main, nullptr,
                  [&] { write_all<<<grid, 256, 0, main>>>((uint4 *)host2, count, 7); });
        bandwidth(kind + ": SM copy to GPU", bytes, 1, main, nullptr,
                  [&] { copy_all<<<grid, 256, 0, main>>>((uint4 *)device, (uint4 *)host, count); });
        bandwidth(kind + ": SM copy from GPU", bytes, 1, main, nullptr,
                  [&] { copy_all<<<grid, 256, 0, main>>>((uint4 *)host2, (uint4 *)device2, count); });
        CHECK(cudaGetLastError());
    }
    latency(kind, host, CHAIN, device2, main);
}

static void with_peer(void *device, void *device2) {
    int can = 0;
    CHECK(cudaDeviceCanAccessPeer(&can, 0, 1));
    if (!can)
        return;
    CHECK(cudaDeviceEnablePeerAccess(1, 0));
    CHECK(cudaSetDevice(1));
    CHECK(cudaDeviceEnablePeerAccess(0, 0));
    void *far, *far2;
    CHECK(cudaMalloc(&far, LARGEST));
    CHECK(cudaMalloc(&far2, LARGEST));
    cudaStream_t main, there;
    CHECK(cudaStreamCreateWithFlags(&there, cudaStreamNonBlocking));
    CHECK(cudaSetDevice(0));
    CHECK(cudaStreamCreateWithFlags(&main, cudaStreamNonBlocking));
    unsigned *out;
    CHECK(cudaMalloc(&out, 4));
    int grid = blocks();
    const std::string pair = "GPU 0 to GPU 1";
    for (size_t bytes : SIZES) {
        size_t count = bytes / sizeof(uint4);
        auto copy = [&](void *to, void *from, cudaStream_t stream) {
            CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream));
        };
        bandwidth(pair + ": copy engine write", bytes, 1, main, nullptr, [&] { copy(far2, device, main); });
        bandwidth(pair + ": copy engine read", bytes, 1, main, nullptr, [&] { copy(device2, far, main); });
        bandwidth(pair + ": copy engine both ways", bytes, 2, main, there, [&] {
            copy(far2, device, main);
            copy(device2, far, there);
        });
        bandwidth(pair + ": SM read", bytes, 1, main, nullptr,
                  [&] { read_all<<<grid, 256, 0, main>>>((uint4 *)far, count, out); });
        bandwidth(pair + ": SM write", bytes, 1, main, nullptr,
                  [&] { write_all<<<grid, 256, 0, main>>>((uint4 *)far2, count, 7); });
        CHECK(cudaGetLastError());
    }
    latency(pair, far, CHAIN, far2, main);
}

int main() {
    cudaDeviceProp properties;
    int count, node = -1;
    CHECK(cudaGetDeviceCount(&count));
    CHECK(cudaSetDevice(0));
    CHECK(cudaFree(nullptr));
    CHECK(cudaGetDeviceProperties(&properties, 0));
    printf("{\"device\": \"%s\", \"figures\": [", properties.name);
    void *pinned, *pinned2, *device, *device2;
    CHECK(cudaMallocHost(&pinned, LARGEST));
    CHECK(cudaMallocHost(&pinned2, LARGEST));
    CHECK(cudaMalloc(&device, LARGEST));
    CHECK(cudaMalloc(&device2, LARGEST));
    with_host("pinned memory", pinned, pinned2, device, device2);
    CHECK(cudaDeviceGetAttribute(&node, cudaDevAttrHostNumaId, 0));
    if (node >= 0) {
        void *numa = host_numa(LARGEST, node, 0), *numa2 = host_numa(LARGEST, node, 0);
        with_host("HOST_NUMA memory of node " + std::to_string(node), numa, numa2, device, device2);
    }
    cudaStream_t stream;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    for (size_t bytes : SIZES)
        bandwidth("the GPU's memory: copy engine to GPU", bytes, 1, stream, nullptr,
                  [&] { CHECK(cudaMemcpyAsync(device2, device, bytes, cudaMemcpyDeviceToDevice, stream)); });
    latency("the GPU's memory", device, CHAIN, device2, stream);
    if (count > 1)
        with_peer(device, device2);
    printf("\n]}\n");
}
