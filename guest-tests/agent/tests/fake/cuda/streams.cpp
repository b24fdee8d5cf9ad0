// Contexts, streams, events, copies and launches. Work is done by real threads, but the GPU's clock is a model: each piece
// of work takes the time that its bytes take at a fixed rate, so that figures are the same in every run on any machine.
#include <algorithm>
#include <condition_variable>
#include <deque>
#include <thread>

#include "fake.h"

static thread_local Context *context_of_thread;

Context *current() {
    return context_of_thread;
}

struct Stream {
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<std::function<void()>> work;
    bool busy = false, ends = false;
    bool lazy; // works only while a thread waits for it
    int waiting = 0;
    double nanoseconds = 0; // its clock; only its own work reads and moves it
    std::thread worker;

    explicit Stream(int device) : lazy(device == 1 && fault("peer-event-refused")), worker([this] { loop(); }) {}

    void loop() {
        std::unique_lock<std::mutex> lock(mutex);
        for (;;) {
            changed.wait(lock, [this] { return ends || (!work.empty() && (!lazy || waiting)); });
            if (work.empty()) return;
            auto next = std::move(work.front());
            work.pop_front();
            busy = true;
            lock.unlock();
            next();
            lock.lock();
            busy = false;
            changed.notify_all();
        }
    }

    void add(std::function<void()> item) {
        std::lock_guard<std::mutex> lock(mutex);
        work.push_back(std::move(item));
        changed.notify_all();
    }

    void wait() {
        std::unique_lock<std::mutex> lock(mutex);
        waiting++;
        changed.notify_all();
        changed.wait(lock, [this] { return work.empty() && !busy; });
        waiting--;
    }

    bool at_work() {
        std::lock_guard<std::mutex> lock(mutex);
        return busy || !work.empty();
    }
};

struct Event {
    std::mutex mutex;
    std::condition_variable changed;
    u64 recorded = 0, passed = 0;
    double nanoseconds = 0;
};

// All streams of a context; never destroyed, since threads use them to the process' end.
struct Streams {
    std::mutex mutex;
    std::map<Context *, Stream *> own;
    std::map<Stream *, Context *> all;
};

static Streams &streams() {
    static Streams *all = new Streams;
    return *all;
}

static Stream *stream_of(Stream *stream) {
    Context *context = current();
    std::lock_guard<std::mutex> lock(streams().mutex);
    if (stream) return streams().all.count(stream) ? stream : nullptr;
    if (!context) return nullptr;
    Stream *&own = streams().own[context];
    if (!own) {
        own = new Stream(context->device);
        streams().all[own] = context;
    }
    return own;
}

bool at_work(int device) {
    std::lock_guard<std::mutex> lock(streams().mutex);
    for (auto &stream : streams().all)
        if (stream.second->device == device && stream.first->at_work()) return true;
    return false;
}

Result queue(Stream *stream, std::function<void()> work) {
    Stream *to = stream_of(stream);
    if (!to) return INVALID_HANDLE;
    to->add(std::move(work));
    return OK;
}

// Queues work that takes so long by the GPU's clock.
static Result queue_timed(Stream *stream, double nanoseconds, std::function<void()> work) {
    Stream *to = stream_of(stream);
    if (!to) return INVALID_HANDLE;
    to->add([to, nanoseconds, work] {
        to->nanoseconds += nanoseconds;
        work();
    });
    return OK;
}

// Time of copies and kernels of so many bytes: a start, then 50 bytes a nanosecond.
static double time_of(u64 bytes) {
    return 2000 + (double)bytes / 50;
}

// How much longer that takes with HOST_NUMA memory, where a fault demands it: `little` is within what is allowed.
static double slowness(const char *by, const void *memory) {
    if (!is_host_numa(memory)) return 1;
    if (fault("host-numa-slow:little")) return 1.005;
    return fault(by) ? 1.02 : 1;
}

static Context *context_for(int device) {
    static Context *all = [] {
        Context *made = new Context[64];
        for (int i = 0; i < 64; i++) made[i].device = i;
        return made;
    }();
    return all + device;
}

API cuDevicePrimaryCtxRetain(Context **context, int device) {
    if (device < 0 || device >= devices()) return INVALID_DEVICE;
    *context = context_for(device);
    return OK;
}

API cuDevicePrimaryCtxRelease_v2(int device) {
    return device < devices() ? OK : INVALID_DEVICE;
}

API cuCtxSetCurrent(Context *context) {
    context_of_thread = context;
    return OK;
}

API cuCtxGetCurrent(Context **context) {
    *context = context_of_thread;
    return OK;
}

API cuCtxSynchronize() {
    if (!current()) return INVALID_CONTEXT;
    std::map<Stream *, Context *> all;
    {
        std::lock_guard<std::mutex> lock(streams().mutex);
        all = streams().all;
    }
    for (auto &stream : all)
        if (stream.second == current()) stream.first->wait();
    return OK;
}

API cuStreamCreate(Stream **stream, unsigned) {
    if (!current()) return INVALID_CONTEXT;
    *stream = new Stream(current()->device);
    std::lock_guard<std::mutex> lock(streams().mutex);
    streams().all[*stream] = current();
    return OK;
}

API cuStreamDestroy_v2(Stream *stream) {
    {
        std::lock_guard<std::mutex> lock(streams().mutex);
        if (!streams().all.erase(stream)) return INVALID_HANDLE;
    }
    stream->wait();
    {
        std::lock_guard<std::mutex> lock(stream->mutex);
        stream->ends = true;
        stream->changed.notify_all();
    }
    stream->worker.join();
    delete stream;
    return OK;
}

API cuStreamSynchronize(Stream *stream) {
    Stream *which = stream_of(stream);
    if (!which) return INVALID_HANDLE;
    which->wait();
    return OK;
}

API cuEventCreate(Event **event, unsigned) {
    *event = new Event;
    return OK;
}

API cuEventDestroy_v2(Event *event) {
    return event ? OK : INVALID_HANDLE; // it stays: a stream may still have to record it or wait for it
}

API cuEventRecord(Event *event, Stream *stream) {
    Stream *which = stream_of(stream);
    if (!which || which->lazy) return INVALID_HANDLE;
    u64 round;
    {
        std::lock_guard<std::mutex> lock(event->mutex);
        round = ++event->recorded;
    }
    which->add([which, event, round] {
        std::lock_guard<std::mutex> lock(event->mutex);
        event->nanoseconds = which->nanoseconds;
        event->passed = round;
        event->changed.notify_all();
    });
    return OK;
}

static void wait_for(Event *event, u64 round) {
    std::unique_lock<std::mutex> lock(event->mutex);
    event->changed.wait(lock, [&] { return event->passed >= round; });
}

API cuEventSynchronize(Event *event) {
    u64 round;
    {
        std::lock_guard<std::mutex> lock(event->mutex);
        round = event->recorded;
    }
    wait_for(event, round);
    return OK;
}

API cuStreamWaitEvent(Stream *stream, Event *event, unsigned) {
    u64 round;
    {
        std::lock_guard<std::mutex> lock(event->mutex);
        round = event->recorded;
    }
    Stream *which = stream_of(stream);
    if (!which) return INVALID_HANDLE;
    which->add([which, event, round] {
        wait_for(event, round);
        std::lock_guard<std::mutex> lock(event->mutex);
        if (event->nanoseconds > which->nanoseconds) which->nanoseconds = event->nanoseconds;
    });
    return OK;
}

API cuEventElapsedTime(float *milliseconds, Event *from, Event *to) {
    std::lock_guard<std::mutex> first(from->mutex);
    std::lock_guard<std::mutex> second(to->mutex);
    if (!from->recorded || !to->recorded) return INVALID_HANDLE;
    if (from->passed < from->recorded || to->passed < to->recorded) return NOT_READY;
    *milliseconds = (float)((to->nanoseconds - from->nanoseconds) / 1e6);
    if (fault("time-zero")) *milliseconds = 0;
    if (fault("time-negative")) *milliseconds = -*milliseconds;
    if (fault("time-nonsense")) *milliseconds *= 1e-7f;
    return OK;
}
API cuEventElapsedTime_v2(float *milliseconds, Event *from, Event *to) {
    return cuEventElapsedTime(milliseconds, from, to);
}

// Other doubles queue their work by this: it takes as long as a copy of 64 KiB.
API cuLaunchHostFunc(Stream *stream, void (*function)(void *), void *data) {
    return queue_timed(stream, time_of(64 << 10), [function, data] { function(data); });
}

// A byte in the middle is wrong, or the last ones do not arrive; only in copies that are worth it, so that the few
// words in which results come back are right.
static void copy(Address to, Address from, size_t bytes) {
    size_t good = bytes;
    if (bytes >= 4096 && fault("copy-tail")) good -= 8;
    std::memmove((void *)to, (const void *)from, good);
    if (bytes >= 4096 && fault("copy-byte")) ((unsigned char *)to)[bytes / 2] ^= 1;
}

static bool on_two_devices(Address to, Address from) {
    Address start;
    Mapping a, b;
    return mapping_of(to, &start, &a) && mapping_of(from, &start, &b) && a.where.type == DEVICE &&
           b.where.type == DEVICE && a.where.id != b.where.id;
}

API cuMemcpyAsync(Address to, Address from, size_t bytes, Stream *stream) {
    if (!to || !from) return INVALID_VALUE;
    bool loses = fault("p2p-copy-byte") && bytes >= 4096 && on_two_devices(to, from);
    loses = loses || (fault("second-gpu-copy") && bytes >= 4096 && current() && current()->device == 1);
    double slow = std::max(slowness("host-numa-slow:copy", (void *)to), slowness("host-numa-slow:copy", (void *)from));
    return queue_timed(stream, time_of(bytes) * slow, [=] {
        copy(to, from, bytes);
        if (loses) ((unsigned char *)to)[bytes / 2] ^= 1;
    });
}

API cuMemsetD8Async(Address to, unsigned char value, size_t bytes, Stream *stream) {
    return queue_timed(stream, time_of(bytes), [=] { std::memset((void *)to, value, bytes); });
}

struct Module {
    int unused;
};
struct Function {
    char name[64];
};

API cuModuleLoadDataEx(Module **module, const void *image, unsigned, int *, void **) {
    if (!current()) return INVALID_CONTEXT;
    if (!image) return INVALID_VALUE;
    *module = new Module;
    return OK;
}

API cuModuleUnload(Module *module) {
    delete module;
    return OK;
}

API cuModuleGetFunction(Function **function, Module *, const char *name) {
    if (!is_kernel(name)) return NOT_FOUND;
    *function = new Function; // lives as long as the process, as a module of it may
    std::strncpy((*function)->name, name, sizeof (*function)->name - 1);
    (*function)->name[sizeof (*function)->name - 1] = 0;
    return OK;
}

API cuLaunchKernel(Function *function, unsigned grid, unsigned, unsigned, unsigned block, unsigned, unsigned,
                   unsigned, Stream *stream, void **arguments, void **) {
    if (!grid || !block || block > 1024) return INVALID_VALUE;
    Launch launch{grid, block, 0, nullptr, false};
    if (!kernel(function->name, arguments, &launch)) return INVALID_HANDLE;
    // The first argument of each kernel is the memory that it works on.
    double slow = slowness("host-numa-slow:kernel", *(void **)arguments[0]);
    return queue_timed(stream, (2000 + launch.nanoseconds) * slow, [launch] { run(launch); });
}
