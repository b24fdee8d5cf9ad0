// A double of libnvshmem_host.so.3: PEs are processes of one machine, the symmetric heap is shared memory of theirs.
// It has the functions that egm-vendor calls and no others, and works with the double of libcuda alone.
#include <dlfcn.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <map>
#include <vector>

#include "fault.h"

typedef unsigned long long u64;
#define API extern "C" __attribute__((visibility("default")))

static const size_t HEAP = 1ull << 30; // bytes; only what is written takes memory
static const int MOST_PES = 16, MOST_BUFFERS = 64;

// Shared state of a job's PEs, in a file that the id names.
struct Control {
    std::atomic<int> arrived, round, ended;
    char path[MOST_BUFFERS][MOST_PES][64]; // where each PE's memory is found; [0] is the heap
};

struct Id {
    int version;
    char name[124];
};

struct Attributes { // nvshmemx_init_attr_v1
    int version;
    void *mpi;
    struct {
        int version;
        struct {
            int version;
            Id *id;
            int rank, ranks;
        } unique_id;
        char content[96];
    } args;
};
static_assert(sizeof(Attributes) == 144, "nvshmemx_init_attr_v1");

// Memory that every PE has, and where the others' lies here.
struct Segment {
    size_t bytes;
    std::vector<char *> of;
};

static Control *control;
static char control_name[124];
static int me, pes;
static int buffers;
static size_t used;
static std::map<char *, Segment> *segments = new std::map<char *, Segment>; // by this PE's address

static void *cuda(const char *name) {
    static void *library = dlopen("libcuda.so.1", RTLD_NOW);
    void *found = library ? dlsym(library, name) : nullptr;
    if (!found) {
        std::fprintf(stderr, "the double of NVSHMEM needs %s\n", name);
        std::exit(-1);
    }
    return found;
}

static void queue(void *stream, std::function<void()> work) {
    auto launch = (int (*)(void *, void (*)(void *), void *))cuda("cuLaunchHostFunc");
    auto run = [](void *data) {
        auto *work = (std::function<void()> *)data;
        (*work)();
        delete work;
    };
    if (launch(stream, run, new std::function<void()>(std::move(work))) != 0) {
        std::fprintf(stderr, "a stream is not one\n");
        std::exit(-1);
    }
}

// The address that `pe` has for the same memory.
static char *at(const void *mine, int pe) {
    auto after = segments->upper_bound((char *)mine);
    if (after != segments->begin()) {
        auto &found = *std::prev(after);
        size_t offset = (size_t)((char *)mine - found.first);
        if (offset < found.second.bytes) return found.second.of[(size_t)pe] + offset;
    }
    return nullptr;
}

static char *symmetric(const void *mine, int pe) {
    char *there = at(mine, pe);
    if (!there) {
        std::fprintf(stderr, "%p is not symmetric memory\n", mine);
        std::exit(-1);
    }
    return there;
}

// Data that a planted fault holds back.
static std::vector<std::function<void()>> *late = new std::vector<std::function<void()>>;

static void barrier() {
    for (auto &copy : *late) copy();
    late->clear();
    int round = control->round.load();
    if (control->arrived.fetch_add(1) + 1 == pes) {
        control->arrived = 0;
        control->round = round + 1;
        syscall(SYS_futex, &control->round, FUTEX_WAKE, MOST_PES, nullptr, nullptr, 0);
        return;
    }
    while (control->round.load() == round) syscall(SYS_futex, &control->round, FUTEX_WAIT, round, nullptr, nullptr, 0);
}

API int nvshmemx_get_uniqueid(Id *id) {
    static int jobs;
    std::snprintf(id->name, sizeof id->name, "/dev/shm/egm-fake-shmem-%d-%d", (int)getpid(), jobs++);
    return 0;
}

API int nvshmemx_set_attr_uniqueid_args(int rank, int ranks, Id *id, Attributes *attributes) {
    attributes->args.unique_id.id = id;
    attributes->args.unique_id.rank = rank;
    attributes->args.unique_id.ranks = ranks;
    return 0;
}

// Publishes where this PE's memory is, and maps the others'.
static Segment share(char *mine, int fd, size_t bytes) {
    int which = buffers++;
    std::snprintf(control->path[which][me], sizeof control->path[which][me], "/proc/%d/fd/%d", (int)getpid(), fd);
    barrier();
    Segment segment{bytes, {}};
    for (int pe = 0; pe < pes; pe++) {
        int theirs = open(control->path[which][pe], O_RDWR | O_CLOEXEC);
        void *there = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, theirs, 0);
        close(theirs);
        segment.of.push_back(pe == me ? mine : (char *)there);
        if (there == MAP_FAILED) std::exit(-1);
    }
    barrier();
    return segment;
}

// Whether the environment has that value.
static bool says(const char *name, const char *value) {
    const char *is = std::getenv(name);
    return is && std::strcmp(is, value) == 0;
}

API int nvshmemx_hostlib_init_attr(unsigned flags, Attributes *attributes) {
    void *context = nullptr;
    ((int (*)(void **))cuda("cuCtxGetCurrent"))(&context);
    if (!context) return 5; // no GPU selected
    // The settings of egm-guest: no network, the id by a socket, and nothing that can put a host's GPUs out of service.
    if (!says("NVSHMEM_REMOTE_TRANSPORT", "none") || !says("NVSHMEM_BOOTSTRAP", "UID")) return 3;
    if (!says("NVSHMEM_DISABLE_NVLS", "1")) return 3;
    const auto &job = attributes->args.unique_id;
    if (flags != 8 || attributes->version != (1 << 16) + 144 || job.ranks > MOST_PES) return 1;
    me = job.rank;
    pes = job.ranks;
    std::snprintf(control_name, sizeof control_name, "%s", job.id->name);
    int file = open(control_name, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (file < 0 || ftruncate(file, sizeof(Control)) != 0) return 7;
    control = (Control *)mmap(nullptr, sizeof(Control), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (control == MAP_FAILED) return 7;
    barrier();
    if (me == 0) unlink(control_name);
    int fd = (int)syscall(SYS_memfd_create, "fake heap", 1u);
    if (fd < 0 || ftruncate(fd, (off_t)HEAP) != 0) return 2;
    char *mine = (char *)mmap(nullptr, HEAP, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (mine == MAP_FAILED) return 2;
    (*segments)[mine] = share(mine, fd, HEAP);
    // NVSHMEM, too, prints on standard output.
    std::printf("WARN: this is a double of NVSHMEM\n");
    return 0;
}

API void nvshmemx_hostlib_finalize() {
    barrier();
}

API void nvshmemx_vendor_get_version_info(int *major, int *minor, int *patch) {
    *major = 3;
    *minor = 4;
    *patch = 5;
}

API int nvshmem_my_pe() {
    return fault("shmem-wrong-pe") ? 0 : me;
}

API int nvshmem_n_pes() {
    return pes;
}

API void *nvshmem_malloc(size_t bytes) {
    barrier();
    char *mine = segments->begin()->first;
    for (auto &segment : *segments)
        if (segment.second.bytes == HEAP) mine = segment.first;
    size_t offset = used;
    used += (bytes + 511) / 512 * 512;
    return used > HEAP ? nullptr : mine + offset;
}

API void nvshmem_free(void *) {
    barrier();
}

API void *nvshmem_ptr(const void *mine, int pe) {
    if (fault("shmem-peer-none") && pe != me) return nullptr;
    return at(mine, pe);
}

API void *nvshmemx_buffer_register_symmetric(void *buffer, size_t bytes, int) {
    auto retain = (int (*)(u64 *, void *))cuda("cuMemRetainAllocationHandle");
    auto give = (int (*)(void *, u64, int, u64))cuda("cuMemExportToShareableHandle");
    u64 handle = 0;
    int fd = -1;
    if (retain(&handle, buffer) != 0 || give(&fd, handle, 1, 0) != 0) {
        std::fprintf(stderr, "%p is not memory of cuMemCreate with a file descriptor\n", buffer);
        return nullptr;
    }
    if (fault("shmem-register-other")) {
        fd = (int)syscall(SYS_memfd_create, "another buffer", 1u);
        if (ftruncate(fd, (off_t)bytes) != 0) return nullptr;
    }
    char *mine = (char *)mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (mine == MAP_FAILED) return nullptr;
    (*segments)[mine] = share(mine, fd, bytes);
    return mine;
}

API int nvshmemx_buffer_unregister_symmetric(void *mine, size_t bytes) {
    barrier();
    auto found = segments->find((char *)mine);
    if (found == segments->end() || found->second.bytes != bytes) return 1;
    segments->erase(found);
    return 0;
}

static void move_bytes(char *to, const char *from, size_t bytes, const char *byte, const char *tail, const char *over) {
    size_t good = bytes;
    if (bytes > 1 && fault(tail)) good--;
    std::memmove(to, from, good);
    if (bytes > 64 && fault(byte)) to[bytes / 2] ^= 4;
    if (fault(over)) to[bytes] ^= 1;
}

static void put(void *to, const void *from, size_t bytes, int pe) {
    move_bytes(symmetric(to, pe), (const char *)from, bytes, "shmem-put-byte", "shmem-put-tail", "shmem-put-over");
}

static void get(void *to, const void *from, size_t bytes, int pe) {
    int whom = fault("shmem-get-own") ? me : pe;
    move_bytes((char *)to, symmetric(from, whom), bytes, "shmem-get-byte", "shmem-get-tail", "shmem-get-over");
}

API void nvshmem_putmem(void *to, const void *from, size_t bytes, int pe) {
    put(to, from, bytes, pe);
}

API void nvshmem_getmem(void *to, const void *from, size_t bytes, int pe) {
    get(to, from, bytes, pe);
}

API void nvshmemx_putmem_on_stream(void *to, const void *from, size_t bytes, int pe, void *stream) {
    queue(stream, [=] { put(to, from, bytes, pe); });
}

API void nvshmemx_getmem_on_stream(void *to, const void *from, size_t bytes, int pe, void *stream) {
    queue(stream, [=] { get(to, from, bytes, pe); });
}

static void signal(uint64_t *word, uint64_t value, int what, int pe) {
    auto *there = (uint64_t *)symmetric(word, pe);
    if (what == 9) {
        __atomic_store_n(there, value, __ATOMIC_RELEASE);
    } else {
        static int adds;
        if (fault("shmem-add-lost") && me == 0 && adds++ == 3) return;
        __atomic_fetch_add(there, value, __ATOMIC_RELEASE);
    }
}

API void nvshmemx_putmem_signal_on_stream(void *to, const void *from, size_t bytes, uint64_t *word, uint64_t value,
                                          int what, int pe, void *stream) {
    queue(stream, [=] {
        if (fault("shmem-signal-first")) {
            late->push_back([=] { std::memmove(symmetric(to, pe), from, bytes); });
            return signal(word, value, what, pe);
        }
        std::memmove(symmetric(to, pe), from, bytes);
        signal(word, value, what, pe);
    });
}

API void nvshmemx_signal_op_on_stream(uint64_t *word, uint64_t value, int what, int pe, void *stream) {
    queue(stream, [=] { signal(word, value, what, pe); });
}

API void nvshmemx_signal_wait_until_on_stream(uint64_t *word, int compare, uint64_t value, void *stream) {
    queue(stream, [=] {
        for (;;) {
            uint64_t is = __atomic_load_n(word, __ATOMIC_ACQUIRE);
            if (compare == 0 ? is == value : is >= value) return;
            sched_yield();
        }
    });
}

API void nvshmemx_quiet_on_stream(void *stream) {
    queue(stream, [] {});
}

API void nvshmem_barrier_all() {
    ((int (*)())cuda("cuCtxSynchronize"))();
    barrier();
}

API void nvshmemx_barrier_all_on_stream(void *stream) {
    queue(stream, [] {
        if (!fault("shmem-barrier-early")) barrier();
    });
}

API int nvshmemx_uint64_sum_reduce_on_stream(int, u64 *to, const u64 *from, size_t words, void *stream) {
    queue(stream, [=] {
        barrier();
        for (size_t i = 0; i < words; i++) {
            u64 sum = 0;
            for (int pe = fault("shmem-sum-one-less") ? 1 : 0; pe < pes; pe++) sum += ((u64 *)symmetric(from, pe))[i];
            to[i] = sum;
        }
        barrier();
    });
    return 0;
}

API int nvshmemx_uint64_max_reduce_on_stream(int, u64 *to, const u64 *from, size_t words, void *stream) {
    queue(stream, [=] {
        barrier();
        for (size_t i = 0; i < words; i++) {
            u64 most = 0;
            for (int pe = 0; pe < pes; pe++) {
                u64 theirs = ((u64 *)symmetric(from, pe))[i];
                // Signed where it should not be: wrong for words with the highest bit.
                bool more = fault("shmem-max-signed") ? (long long)theirs > (long long)most : theirs > most;
                if (pe == 0 || more) most = theirs;
            }
            to[i] = most;
        }
        barrier();
    });
    return 0;
}

API int nvshmemx_broadcastmem_on_stream(int, void *to, const void *from, size_t bytes, int root, void *stream) {
    queue(stream, [=] {
        barrier();
        std::memmove(to, symmetric(from, root), bytes);
        if (fault("shmem-broadcast-byte") && bytes > 8) ((char *)to)[bytes - 1] ^= 1;
        barrier();
    });
    return 0;
}

API int nvshmemx_fcollectmem_on_stream(int, void *to, const void *from, size_t bytes, void *stream) {
    queue(stream, [=] {
        barrier();
        for (int pe = 0; pe < pes; pe++) {
            int whose = fault("shmem-collect-order") ? pes - 1 - pe : pe;
            std::memmove((char *)to + (size_t)pe * bytes, symmetric(from, whose), bytes);
        }
        barrier();
    });
    return 0;
}

API int nvshmemx_alltoallmem_on_stream(int, void *to, const void *from, size_t bytes, void *stream) {
    queue(stream, [=] {
        barrier();
        for (int pe = 0; pe < pes; pe++) {
            int which = fault("shmem-exchange-own") ? pe : me;
            std::memmove((char *)to + (size_t)pe * bytes, symmetric(from, pe) + (size_t)which * bytes, bytes);
        }
        barrier();
    });
    return 0;
}
