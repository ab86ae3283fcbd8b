#include "pool.h"

#include <bit>
#include <chrono>
#include <new>
#include <sched.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#if defined(__x86_64__)
#include <immintrin.h>
static inline void relax() { _mm_pause(); }
#else
static inline void relax() { __asm__ volatile("yield"); }
#endif

// About 30 us: the gap between two operations of a decode step is 3 to 10 us of Python, a park and wake costs about 50 us.
static constexpr int SPINS = 2000;

// With more threads than cores a spinning thread keeps a core from one that has work.
static int spins_of(int threads) {
    cpu_set_t allowed;
    return sched_getaffinity(0, sizeof allowed, &allowed) == 0 && threads > CPU_COUNT(&allowed) ? 0 : SPINS;
}
static constexpr uint32_t OPEN = 1u << 31;

Pool::Pool(int threads, std::vector<int> cpus)
    : threads_(threads < 1 ? 1 : threads), spins_(spins_of(threads_)), cpus_(std::move(cpus)),
      buffers_(SLOTS + threads_ * THREAD_SLOTS), ranges_(new Range[threads_]) {}

// A hint: a core that went away meanwhile leaves the thread where the system puts it.
static void bind(int cpu) {
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(cpu, &one);
    sched_setaffinity(0, sizeof one, &one);
}

// With a stranger on its core a thread that is late by the stranger's slice makes all others wait. In short slices of its own it has the
// same share of the core and its turn soon (EEVDF, Linux 6.12 and newer; others refuse and nothing changes). Not for its children.
// `engine/cores.py` asks the same for threads that Python starts.
void short_slices() {
    constexpr uint64_t RESET_ON_FORK = 1; // SCHED_FLAG_RESET_ON_FORK of linux/sched.h, which glibc's headers clash with
#ifdef SYS_sched_setattr
    struct {
        uint32_t size, policy;
        uint64_t flags;
        int32_t nice;
        uint32_t priority;
        uint64_t slice, deadline, period; // nanoseconds
    } wanted{48, SCHED_OTHER, RESET_ON_FORK, getpriority(PRIO_PROCESS, 0), 0, 100'000, 0, 0};
    if (sched_getscheduler(0) == SCHED_OTHER) syscall(SYS_sched_setattr, 0, &wanted, 0);
#endif
}

Pool::~Pool() {
    if (owner_ != getpid()) {
        workers_.release();
        return;
    }
    stop_ = true;
    generation_.fetch_add(1);
    generation_.notify_all();
    for (auto& w : *workers_) w.join();
}

void Pool::start() {
    // In a forked child the old handles name threads that do not exist there: to join, detach or destroy them is undefined.
    workers_.release();
    workers_ = std::make_unique<std::vector<std::thread>>();
    gate_ = 0;
    owner_ = getpid();
    const uint64_t seen = generation_.load();
    short_slices();
    for (int i = 1; i < threads_; i++) workers_->emplace_back(&Pool::work, this, i, seen);
}

static int64_t nanoseconds() { return std::chrono::steady_clock::now().time_since_epoch().count(); }

std::vector<Pool::Traced> Pool::trace(bool on) {
    tracing_ = on;
    return std::exchange(traced_, {});
}

void Pool::dispatch(Part part, int64_t tasks, Fn fn, void* self) {
    if (tasks <= 0) return;
    const int64_t asked = tracing_ ? nanoseconds() : 0;
    const bool alone = threads_ == 1 || tasks == 1;
    if (alone) {
        for (int64_t t = 0; t < tasks; t++) fn(self, t, 0);
    } else {
        fn_ = fn, self_ = self;
        spread(tasks);
    }
    if (!tracing_) return;
    traced_.push_back(Traced{part, tasks, asked, nanoseconds(), {}});
    for (int i = 0; !alone && i < threads_; i++) traced_.back().threads.emplace_back(ranges_[i].from, ranges_[i].to);
}

void Pool::spread(int64_t tasks) {
    if (owner_ != getpid()) start();
    for (int64_t i = 0; i < threads_; i++) {
        ranges_[i].next.store(i * tasks / threads_, std::memory_order_relaxed);
        ranges_[i].end = (i + 1) * tasks / threads_;
        ranges_[i].from = ranges_[i].to = 0;
    }
    gate_.store(OPEN, std::memory_order_release);
    generation_.fetch_add(1, std::memory_order_release);
    generation_.notify_all();
    take(0);
    gate_.fetch_and(~OPEN, std::memory_order_acq_rel);
    for (int spins = 0; gate_.load(std::memory_order_acquire);)
        ++spins < spins_ ? relax() : (void)sched_yield();
}

void Pool::take(int thread) {
    if (tracing_) ranges_[thread].from = nanoseconds();
    for (int i = 0; i < threads_; i++) {
        Range& r = ranges_[(thread + i) % threads_];
        for (int64_t t; (t = r.next.fetch_add(1, std::memory_order_relaxed)) < r.end;) fn_(self_, t, thread);
    }
    if (tracing_) ranges_[thread].to = nanoseconds();
}

void Pool::work(int thread, uint64_t seen) {
    if (thread < (int)cpus_.size()) bind(cpus_[thread]);
    short_slices();
    for (;;) {
        uint64_t now;
        for (int spins = 0; (now = generation_.load(std::memory_order_acquire)) == seen;)
            ++spins < spins_ ? relax() : generation_.wait(seen, std::memory_order_acquire);
        seen = now;
        if (stop_) return;
        uint32_t gate = gate_.load(std::memory_order_relaxed);
        while (gate & OPEN && !gate_.compare_exchange_weak(gate, gate + 1, std::memory_order_acquire)) {}
        if (!(gate & OPEN)) continue;
        take(thread);
        gate_.fetch_sub(1, std::memory_order_release);
    }
}

Pool::Buffer::~Buffer() {
    if (data) munmap(data, size);
}

void* Pool::Buffer::need(size_t bytes) {
    if (bytes <= size) return data;
    // Whole huge pages for what fills one: scratch is touched end to end, in parallel. A few rows do not, and a fresh huge page takes 4 to
    // 20 ms on a virtual machine: two dozen buffers made the first prompt of an engine wait 0.2 s.
    constexpr size_t HUGE_PAGE = 2 << 20;
    const bool large = bytes >= HUGE_PAGE;
    const size_t want = large ? (bytes + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE : std::bit_ceil(bytes < 4096 ? 4096 : bytes);
    void* fresh = mmap(nullptr, want, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (fresh == MAP_FAILED) throw std::bad_alloc();
    madvise(fresh, want, large ? MADV_HUGEPAGE : MADV_NOHUGEPAGE); // a hint; without it only speed is lost
    if (data) munmap(data, size);
    data = fresh, size = want;
    return data;
}

void* Pool::shared(int slot, size_t bytes) { return buffers_[slot].need(bytes); }
void* Pool::local(int thread, int slot, size_t bytes) {
    return buffers_[SLOTS + thread * THREAD_SLOTS + slot].need(bytes);
}
