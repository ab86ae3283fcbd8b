// One pool of worker threads for every kernel; the calling thread works too. No OpenMP, no second pool.
//
// Every thread owns a run of consecutive tasks, so that it can prefetch its next one, and helps others when its own are done;
// which thread ran a task never changes its result.
// A worker spins for a short while after a job (decode issues the next one within microseconds), then sleeps on a futex; with more
// threads than cores it sleeps at once.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

// This thread need not wait, when it wakes, until threads that compute had their turn. A hint.
void short_slices();

class Pool {
public:
    // task number, thread number (0 = caller), both from 0
    using Fn = void (*)(void* self, int64_t task, int thread);

    // cpus: a processor for each thread, or none: the system places them. Thread 0 is the caller's and stays where it is.
    explicit Pool(int threads, std::vector<int> cpus = {});
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    int threads() const { return threads_; }

    // 64-byte aligned memory that grows; what it held is lost then. Throws std::bad_alloc.
    struct Buffer {
        void* data = nullptr;
        size_t size = 0;
        void* need(size_t bytes);
        ~Buffer();
    };

    // Holds the pool for one operation; scratch belongs to the holder. Callers on other threads wait their turn.
    std::unique_lock<std::mutex> hold() { return std::unique_lock(mutex_); }

    // What some tasks are and the bytes of weights or pages they read, for whoever asks where the time goes.
    struct Part {
        const char* name;
        int64_t bytes = 0;
    };

    // f(task, thread) for every task in [0, tasks). Returns when all are done. The caller holds the pool; f must not throw.
    template <class Body> void run(Part part, int64_t tasks, const Body& f) {
        dispatch(part, tasks, [](void* self, int64_t task, int thread) { (*static_cast<const Body*>(self))(task, thread); },
                 const_cast<Body*>(&f));
    }

    // When tasks were asked for and done, and from when to when each thread was at them (0, 0: it came too late), in nanoseconds.
    struct Traced {
        Part part;
        int64_t tasks, asked, done;
        std::vector<std::pair<int64_t, int64_t>> threads;
    };
    // Keeps times from here on (or no longer) and returns those kept so far. Costs a test of a flag where nobody asks.
    std::vector<Traced> trace(bool on);

    // 64-byte aligned memory that lives until the next call with the same slot. Throws std::bad_alloc.
    // Slots 0..SLOTS-1 are shared by an operation; each thread has THREAD_SLOTS of its own.
    static constexpr int SLOTS = 4, THREAD_SLOTS = 3;
    void* shared(int slot, size_t bytes);
    void* local(int thread, int slot, size_t bytes); // call on the caller's thread, before run()

private:
    struct alignas(64) Range {
        std::atomic<int64_t> next{0};
        int64_t end = 0;
        int64_t from = 0, to = 0; // when the thread was at its tasks
    };
    void dispatch(Part part, int64_t tasks, Fn fn, void* self);
    void spread(int64_t tasks);
    void take(int thread);
    void work(int thread, uint64_t seen);
    void start();

    const int threads_, spins_;
    const std::vector<int> cpus_;
    int64_t owner_ = -1; // process whose threads these are: a forked child starts its own
    std::mutex mutex_;
    std::unique_ptr<std::vector<std::thread>> workers_; // null until the first job; given up, not destroyed, in a forked child
    std::vector<Buffer> buffers_;
    Fn fn_ = nullptr;
    void* self_ = nullptr;
    std::unique_ptr<Range[]> ranges_;
    bool tracing_ = false;
    std::vector<Traced> traced_;
    // bit 31: a job is open to enter; below: workers inside. A worker that wakes late finds it closed and nobody waits for it.
    alignas(64) std::atomic<uint32_t> gate_{0};
    alignas(64) std::atomic<uint64_t> generation_{0};
    std::atomic<bool> stop_{false};
};
