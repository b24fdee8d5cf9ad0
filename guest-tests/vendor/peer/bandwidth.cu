// What egm-guest's figures are held against: the same quantities by a plain program of CUDA's runtime interface, which has
// no line in common with it. `beside` builds and runs it.
//
//     bandwidth [PART…]
//
// PART is one of device, pinned, registered, managed, host_numa, pool and p2p; all without one. Prints "ready GPU" once it has its
// memory, then reads lines with a series and bytes, a tab in between, and answers each: with the value of a round (GB/s, or
// ns for latency) and its seconds, after some milliseconds that do not count, or with "-" where it has no such figure. A
// round does as much as one of egm-guest's. Names of series are egm-guest's, and so are kinds of memory: the GPU's own is made by cuMemCreate here too. Series that end with
// "of cudaMalloc" say what the plain allocator's memory does instead.

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <iostream>
#include <map>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include <cuda.h>
#include <cuda_runtime.h>
#include <dlfcn.h>
#include <sys/mman.h>

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
static const size_t MANAGED = size_t(256) << 20;
// Bytes that a round moves at least, with memory of the host and where nothing leaves GPUs.
static const size_t ROUND = size_t(256) << 20, ROUND_OF_GPUS = size_t(2) << 30;
// Seconds that a GPU works before a round counts.
static const double WARM = 5e-3;

static std::vector<std::string> parts; // what is measured

static bool wanted(const char *part) {
    return parts.empty() || std::find(parts.begin(), parts.end(), part) != parts.end();
}

// A figure: `prepare` comes before its first round after another figure's; both with `gpu` as the current one. A round's
// seconds make its value.
struct Figure {
    int gpu;
    std::function<void()> prepare;
    std::function<double()> round;
    std::function<double(double)> value;
};

static std::map<std::pair<std::string, size_t>, Figure> figures;

static void figure(const std::string &series, size_t bytes, std::function<double()> round,
                   std::function<double(double)> value, std::function<void()> prepare = [] {}) {
    int gpu;
    CHECK(cudaGetDevice(&gpu));
    figures[{series, bytes}] = {gpu, prepare, round, value};
}

// Four loads are on their way at once: one at a time does not fill the GPU's own memory.
__global__ void read_all(const uint4 *from, size_t count, unsigned *out) {
    unsigned mixed = 0;
    size_t step = size_t(gridDim.x) * blockDim.x, i = size_t(blockIdx.x) * blockDim.x + threadIdx.x;
    for (; i + 3 * step < count; i += 4 * step) {
        uint4 v = from[i], w = from[i + step], x = from[i + 2 * step], y = from[i + 3 * step];
        mixed ^= v.x ^ v.y ^ v.z ^ v.w ^ w.x ^ w.y ^ w.z ^ w.w ^ x.x ^ x.y ^ x.z ^ x.w ^ y.x ^ y.y ^ y.z ^ y.w;
    }
    for (; i < count; i += step)
        mixed ^= from[i].x ^ from[i].y ^ from[i].z ^ from[i].w;
    if (mixed == 0x12345678) // keeps the compiler from removing the reads
        *out = mixed;
}

// What is written looks random, as what egm-guest writes does.
__global__ void write_all(uint4 *to, size_t count, unsigned value) {
    size_t step = size_t(gridDim.x) * blockDim.x;
    for (size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += step) {
        unsigned x = (unsigned(i) + value) * 2654435761u, y = x ^ x >> 15;
        to[i] = make_uint4(x, y, x * 0x85ebca6bu, y * 0xc2b2ae35u);
    }
}

__global__ void copy_all(uint4 *to, const uint4 *from, size_t count) {
    size_t step = size_t(gridDim.x) * blockDim.x, i = size_t(blockIdx.x) * blockDim.x + threadIdx.x;
    for (; i + 3 * step < count; i += 4 * step) {
        uint4 v = from[i], w = from[i + step], x = from[i + 2 * step], y = from[i + 3 * step];
        to[i] = v;
        to[i + step] = w;
        to[i + 2 * step] = x;
        to[i + 3 * step] = y;
    }
    for (; i < count; i += step)
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

// Measures seconds of `work` on `main`, and on `side`, started with it. `lead` comes before the clock starts.
static std::function<double()> clocked(cudaStream_t main, cudaStream_t side, std::function<void()> work,
                                       std::function<void()> lead = nullptr) {
    cudaEvent_t begin, end, joined = nullptr;
    CHECK(cudaEventCreate(&begin));
    CHECK(cudaEventCreate(&end));
    if (side) {
        int device, other;
        CHECK(cudaGetDevice(&device));
        CHECK(cudaStreamGetDevice(side, &other));
        CHECK(cudaSetDevice(other));
        CHECK(cudaEventCreateWithFlags(&joined, cudaEventDisableTiming));
        CHECK(cudaSetDevice(device));
    }
    return [=] {
        if (lead)
            lead();
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
        CHECK(cudaGetLastError());
        float milliseconds;
        CHECK(cudaEventElapsedTime(&milliseconds, begin, end));
        return milliseconds / 1e3;
    };
}

static void bandwidth(const std::string &series, size_t bytes, size_t round, int directions, cudaStream_t main,
                      cudaStream_t side, std::function<void()> work) {
    int repeats = int(std::max<size_t>(1, round / bytes));
    auto all = [=] {
        for (int i = 0; i < repeats; i++)
            work();
    };
    // As in egm-guest, one stream is at work already when the clock starts, while the rest is queued.
    auto seconds = clocked(main, side, all, side ? nullptr : work);
    figure(series, bytes, seconds, [=](double took) { return double(bytes) * repeats * directions / took / 1e9; });
}

// `scratch` is of the memory's own GPU: writing it leaves nothing of the chain in that one's cache.
static void latency(const std::string &series, void *memory, size_t bytes, void *scratch, cudaStream_t stream) {
    const size_t apart = 512, links = bytes / apart, steps = 8192;
    unsigned *at;
    CHECK(cudaMalloc(&at, 4));
    auto prepare = [=] {
        std::vector<unsigned> order(links), chain(links * apart / 4);
        std::iota(order.begin(), order.end(), 0u);
        std::shuffle(order.begin(), order.end(), std::mt19937(42));
        for (size_t i = 0; i < links; i++)
            chain[order[i] * (apart / 4)] = unsigned(order[(i + 1) % links] * (apart / 4));
        CHECK(cudaMemcpy(memory, chain.data(), links * apart, cudaMemcpyDefault));
        read_all<<<blocks(), 256>>>((const uint4 *)memory, bytes / sizeof(uint4), at); // where pages move, they are here now
        CHECK(cudaMemset(at, 0, 4));
        CHECK(cudaMemset(scratch, 0, LARGEST));
        CHECK(cudaDeviceSynchronize());
    };
    auto seconds = clocked(stream, nullptr, [=] { chase<<<1, 1, 0, stream>>>((const unsigned *)memory, steps, at); });
    figure(series + ": latency", bytes, seconds, [=](double took) { return took * 1e9 / steps; }, prepare);
}

// Memory by cuMemCreate, of a host's NUMA node (`node` >= 0), then for processors too, or of the first of `gpus`; for all
// of `gpus`.
static void *created(size_t bytes, int node, const std::vector<int> &gpus) {
    static void *library = dlopen("libcuda.so.1", RTLD_NOW);
    static auto create = (decltype(&cuMemCreate))dlsym(library, "cuMemCreate");
    static auto reserve = (decltype(&cuMemAddressReserve))dlsym(library, "cuMemAddressReserve");
    static auto map = (decltype(&cuMemMap))dlsym(library, "cuMemMap");
    static auto access = (decltype(&cuMemSetAccess))dlsym(library, "cuMemSetAccess");
    CUmemAllocationProp wanted = {};
    wanted.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    wanted.location.type = node >= 0 ? CU_MEM_LOCATION_TYPE_HOST_NUMA : CU_MEM_LOCATION_TYPE_DEVICE;
    wanted.location.id = node >= 0 ? node : gpus[0];
    CUmemGenericAllocationHandle handle;
    CUdeviceptr address;
    CHECK(create(&handle, bytes, &wanted, 0));
    CHECK(reserve(&address, bytes, size_t(2) << 20, 0, 0));
    CHECK(map(address, bytes, 0, handle, 0));
    std::vector<CUmemAccessDesc> who(gpus.size());
    for (size_t i = 0; i < gpus.size(); i++) {
        who[i].location.type = CU_MEM_LOCATION_TYPE_DEVICE;
        who[i].location.id = gpus[i];
    }
    if (node >= 0) {
        who.push_back({});
        who.back().location = wanted.location;
    }
    for (auto &one : who)
        one.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    CHECK(access(address, bytes, who.data(), who.size()));
    return (void *)address;
}

// Memory of a pool of the host's NUMA node.
static void *pooled(size_t bytes, int node, int device) {
    cudaMemPoolProps wanted = {};
    wanted.allocType = cudaMemAllocationTypePinned;
    wanted.location.type = cudaMemLocationTypeHostNuma;
    wanted.location.id = node;
    cudaMemPool_t pool;
    CHECK(cudaMemPoolCreate(&pool, &wanted));
    cudaMemAccessDesc who = {};
    who.location.type = cudaMemLocationTypeDevice;
    who.location.id = device;
    who.flags = cudaMemAccessFlagsProtReadWrite;
    CHECK(cudaMemPoolSetAccess(pool, &who, 1));
    void *address;
    CHECK(cudaMallocFromPoolAsync(&address, bytes, pool, 0));
    CHECK(cudaDeviceSynchronize());
    return address;
}

static void *registered(size_t bytes) {
    void *address = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(address == MAP_FAILED);
    CHECK(cudaHostRegister(address, bytes, cudaHostRegisterPortable | cudaHostRegisterMapped));
    return address;
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
        auto to = [=] { CHECK(cudaMemcpyAsync(device, host, bytes, cudaMemcpyHostToDevice, main)); };
        auto from = [=](cudaStream_t stream) {
            CHECK(cudaMemcpyAsync(host2, device2, bytes, cudaMemcpyDeviceToHost, stream));
        };
        bandwidth(kind + ": copy engine to GPU", bytes, ROUND, 1, main, nullptr, to);
        bandwidth(kind + ": copy engine from GPU", bytes, ROUND, 1, main, nullptr, [=] { from(main); });
        bandwidth(kind + ": copy engine both ways", bytes, ROUND, 2, main, side, [=] { to(); from(side); });
        bandwidth(kind + ": SM read", bytes, ROUND, 1, main, nullptr,
                  [=] { read_all<<<grid, 256, 0, main>>>((uint4 *)host, count, out); });
        bandwidth(kind + ": SM write", bytes, ROUND, 1, main, nullptr,
                  [=] { write_all<<<grid, 256, 0, main>>>((uint4 *)host2, count, 7); });
        bandwidth(kind + ": SM copy to GPU", bytes, ROUND, 1, main, nullptr,
                  [=] { copy_all<<<grid, 256, 0, main>>>((uint4 *)device, (uint4 *)host, count); });
        bandwidth(kind + ": SM copy from GPU", bytes, ROUND, 1, main, nullptr,
                  [=] { copy_all<<<grid, 256, 0, main>>>((uint4 *)host2, (uint4 *)device2, count); });
        bandwidth(kind + ": SM copy both ways", bytes, ROUND, 2, main, side, [=] {
            copy_all<<<grid / 2, 256, 0, main>>>((uint4 *)device, (uint4 *)host, count);
            copy_all<<<grid / 2, 256, 0, side>>>((uint4 *)host2, (uint4 *)device2, count);
        });
    }
    latency(kind, host, CHAIN, device2, main);
}

static void with_itself(const std::string &kind, void *from, void *to) {
    cudaStream_t main;
    CHECK(cudaStreamCreateWithFlags(&main, cudaStreamNonBlocking));
    unsigned *out;
    CHECK(cudaMalloc(&out, 4));
    int grid = blocks();
    for (size_t bytes : SIZES) {
        size_t count = bytes / sizeof(uint4);
        bandwidth(kind + ": copy engine to GPU", bytes, ROUND_OF_GPUS, 1, main, nullptr,
                  [=] { CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, main)); });
        bandwidth(kind + ": SM read", bytes, ROUND_OF_GPUS, 1, main, nullptr,
                  [=] { read_all<<<grid, 256, 0, main>>>((uint4 *)from, count, out); });
        bandwidth(kind + ": SM write", bytes, ROUND_OF_GPUS, 1, main, nullptr,
                  [=] { write_all<<<grid, 256, 0, main>>>((uint4 *)to, count, 7); });
        bandwidth(kind + ": SM copy to GPU", bytes, ROUND_OF_GPUS, 1, main, nullptr,
                  [=] { copy_all<<<grid, 256, 0, main>>>((uint4 *)to, (uint4 *)from, count); });
    }
    latency(kind, from, CHAIN, to, main);
}

// Managed memory that the GPU touched: a quarter of the largest size, far below what is free.
static void with_managed(const std::string &kind, void *scratch) {
    cudaStream_t main;
    CHECK(cudaStreamCreateWithFlags(&main, cudaStreamNonBlocking));
    unsigned *out;
    CHECK(cudaMalloc(&out, 4));
    uint4 *memory;
    CHECK(cudaMallocManaged(&memory, MANAGED));
    int grid = blocks();
    for (size_t bytes : SIZES) {
        if (bytes > MANAGED)
            continue;
        size_t count = bytes / sizeof(uint4);
        bandwidth(kind + ": SM read", bytes, ROUND_OF_GPUS, 1, main, nullptr,
                  [=] { read_all<<<grid, 256, 0, main>>>(memory, count, out); });
        bandwidth(kind + ": SM write", bytes, ROUND_OF_GPUS, 1, main, nullptr,
                  [=] { write_all<<<grid, 256, 0, main>>>(memory, count, 7); });
    }
    latency(kind, memory, MANAGED, scratch, main);
}


// What GPU `a` moves to and from memory of GPU `b`; `[2]` each, all of which both reach. `by` ends the names.
static void with_peer(int a, int b, void **near, void **far, const std::string &by) {
    CHECK(cudaSetDevice(b));
    cudaStream_t main, there;
    CHECK(cudaStreamCreateWithFlags(&there, cudaStreamNonBlocking));
    CHECK(cudaSetDevice(a));
    CHECK(cudaStreamCreateWithFlags(&main, cudaStreamNonBlocking));
    unsigned *out;
    CHECK(cudaMalloc(&out, 4));
    int grid = blocks();
    const std::string pair = "GPU " + std::to_string(a) + " to GPU " + std::to_string(b);
    for (size_t bytes : SIZES) {
        size_t count = bytes / sizeof(uint4);
        auto copy = [=](void *to, void *from, cudaStream_t stream) {
            CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream));
        };
        bandwidth(pair + ": copy engine write" + by, bytes, ROUND_OF_GPUS, 1, main, nullptr, [=] { copy(far[1], near[0], main); });
        bandwidth(pair + ": copy engine read" + by, bytes, ROUND_OF_GPUS, 1, main, nullptr, [=] { copy(near[1], far[0], main); });
        bandwidth(pair + ": copy engine both ways" + by, bytes, ROUND_OF_GPUS, 2, main, there, [=] {
            copy(far[1], near[0], main);
            copy(near[1], far[0], there);
        });
        if (!by.empty())
            continue;
        bandwidth(pair + ": SM read", bytes, ROUND_OF_GPUS, 1, main, nullptr,
                  [=] { read_all<<<grid, 256, 0, main>>>((uint4 *)far[0], count, out); });
        bandwidth(pair + ": SM write", bytes, ROUND_OF_GPUS, 1, main, nullptr,
                  [=] { write_all<<<grid, 256, 0, main>>>((uint4 *)far[1], count, 7); });
        bandwidth(pair + ": SM write both ways", bytes, ROUND_OF_GPUS, 2, main, there, [=] {
            write_all<<<grid, 256, 0, main>>>((uint4 *)far[1], count, 7);
            CHECK(cudaSetDevice(b));
            write_all<<<grid, 256, 0, there>>>((uint4 *)near[1], count, 7);
            CHECK(cudaSetDevice(a));
        });
    }
    if (by.empty())
        latency(pair, far[0], CHAIN, far[1], main);
}

// All that GPU `gpu` does alone; `own` is memory of it.
static void alone(int gpu, void **own) {
    const std::string name = "GPU " + std::to_string(gpu) + ", ";
    int node = -1;
    CHECK(cudaSetDevice(gpu));
    CHECK(cudaFree(nullptr));
    if (wanted("device"))
        with_itself(name + "the GPU's memory", own[0], own[1]);
    if (wanted("pinned")) {
        void *pinned[2];
        for (void *&memory : pinned)
            CHECK(cudaMallocHost(&memory, LARGEST));
        with_host(name + "pinned memory", pinned[0], pinned[1], own[0], own[1]);
    }
    if (wanted("registered"))
        with_host(name + "registered memory", registered(LARGEST), registered(LARGEST), own[0], own[1]);
    if (wanted("managed"))
        with_managed(name + "managed memory", own[1]);
    CHECK(cudaDeviceGetAttribute(&node, cudaDevAttrHostNumaId, gpu));
    if (node < 0)
        return;
    const std::string of = " node " + std::to_string(node);
    if (wanted("host_numa"))
        with_host(name + "HOST_NUMA memory of" + of, created(LARGEST, node, {gpu}), created(LARGEST, node, {gpu}),
                  own[0], own[1]);
    if (wanted("pool"))
        with_host(name + "a pool on" + of, pooled(LARGEST, node, gpu), pooled(LARGEST, node, gpu), own[0], own[1]);
}

int main(int argc, char **argv) {
    parts.assign(argv + 1, argv + argc);
    cudaDeviceProp properties;
    int count, can = 1, back = 1;
    CHECK(cudaGetDeviceCount(&count));
    CHECK(cudaSetDevice(0));
    CHECK(cudaFree(nullptr));
    CHECK(cudaGetDeviceProperties(&properties, 0));
    count = std::min(count, 2);
    if (count == 2) {
        CHECK(cudaDeviceCanAccessPeer(&can, 0, 1));
        CHECK(cudaDeviceCanAccessPeer(&back, 1, 0));
    }
    bool peers = count == 2 && can && back;
    void *own[2][2], *plain[2][2]; // until the end: figures refer to them
    for (int gpu = 0; gpu < count; gpu++) {
        CHECK(cudaSetDevice(gpu));
        CHECK(cudaFree(nullptr));
        for (void *&memory : own[gpu])
            memory = created(LARGEST, -1, peers ? std::vector<int>{gpu, 1 - gpu} : std::vector<int>{gpu});
    }
    for (int gpu = 0; gpu < count; gpu++)
        alone(gpu, own[gpu]);
    if (peers && wanted("p2p")) {
        with_peer(0, 1, own[0], own[1], "");
        with_peer(1, 0, own[1], own[0], "");
        for (int gpu = 0; gpu < 2; gpu++) {
            CHECK(cudaSetDevice(gpu));
            CHECK(cudaDeviceEnablePeerAccess(1 - gpu, 0));
            for (void *&memory : plain[gpu])
                CHECK(cudaMalloc(&memory, LARGEST));
        }
        with_peer(0, 1, plain[0], plain[1], " of cudaMalloc");
        with_peer(1, 0, plain[1], plain[0], " of cudaMalloc");
    }
    std::cout << "ready " << properties.name << std::endl;
    std::pair<std::string, size_t> last;
    for (std::string line; std::getline(std::cin, line);) {
        size_t tab = line.find('\t');
        auto found = figures.end();
        if (tab != std::string::npos)
            found = figures.find({line.substr(0, tab), strtoull(line.c_str() + tab + 1, nullptr, 10)});
        if (found == figures.end()) {
            std::cout << "-" << std::endl;
            continue;
        }
        auto &[gpu, prepare, round, value] = found->second;
        CHECK(cudaSetDevice(gpu));
        if (found->first != last)
            prepare();
        last = found->first;
        for (double worked = 0; worked < WARM;)
            worked += round();
        double took = round();
        std::cout << value(took) << " " << took << std::endl;
    }
}
