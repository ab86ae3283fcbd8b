#include "reader.h"
#include "pool.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <sys/uio.h>

namespace {

constexpr int64_t BLOCK = 4096; // direct reads begin and end on the disk's blocks
constexpr size_t KEPT = 1 << 14; // reads that are remembered

double now() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

template <class Queue, class T> bool has(const Queue& queue, const T& item) {
    return std::find(queue.begin(), queue.end(), item) != queue.end();
}

bool on_borders(const Shelf& s) {
    bool all = true;
    for (int i = 0; i < 2; i++) all = all && (uintptr_t)s.base[i] % BLOCK == 0 && s.bytes[i] % BLOCK == 0;
    return all && s.piece % BLOCK == 0;
}

} // namespace

Reader::Reader(const Shelf& shelf, int threads)
    : shelf_(shelf), pieces_((shelf.record + shelf.piece - 1) / shelf.piece), direct_(on_borders(shelf)) {
    for (int i = 0; i < threads; i++) threads_.emplace_back(&Reader::work, this);
}

void Reader::submit(const std::vector<Want>& wants, bool behind) {
    std::lock_guard lock(mutex_);
    for (const Want& want : wants) {
        if (closed_) {
            done_[want.key] = {now(), End::FAILED, "the link is closed"};
            continue;
        }
        auto job = std::make_unique<Job>();
        job->want = want;
        job->there.resize(pieces_);
        (behind ? behind_ : queue_).push_back(job.get());
        jobs_[want.key] = std::move(job);
        for (int64_t i = 0; i < std::min<int64_t>(behind ? shelf_.ahead : pieces_, (int64_t)threads_.size()); i++) wanted_.notify_one();
    }
    if (closed_) arrived_.notify_all();
}

// Those that were to be read behind everything, or were taken back half way, are needed now.
void Reader::hurry(const std::vector<int64_t>& keys) {
    std::lock_guard lock(mutex_);
    for (int64_t key : keys) {
        const auto found = jobs_.find(key);
        if (found == jobs_.end() || has(queue_, found->second.get())) continue;
        Job* job = found->second.get();
        if (has(behind_, job))
            drop(job);
        else if (!job->problem || job->problem->end != End::TAKEN_BACK)
            continue; // its last pieces are on their way, or it has failed
        job->problem.reset();
        if (job->next < pieces_) {
            queue_.push_back(job);
            wanted_.notify_all();
        }
    }
}

// Take back what is not there yet; returns those of which nothing is on its way. Of the others no further piece begins.
std::vector<int64_t> Reader::cancel(const std::vector<int64_t>& keys) {
    std::lock_guard lock(mutex_);
    std::vector<int64_t> taken;
    for (int64_t key : keys) {
        const auto found = jobs_.find(key);
        if (found == jobs_.end()) continue;
        Job* job = found->second.get();
        if (job->under_way && job->next == pieces_) continue;
        drop(job);
        if (job->under_way) {
            if (!job->problem) job->problem = {0, End::TAKEN_BACK, "it was taken back"};
        } else {
            jobs_.erase(found);
            taken.push_back(key);
        }
    }
    return taken;
}

Reader::Ended Reader::wait(int64_t key) {
    std::unique_lock lock(mutex_);
    arrived_.wait(lock, [&] { return done_.count(key); });
    Ended ended = done_[key];
    done_.erase(key);
    return ended;
}

std::vector<int64_t> Reader::first(const std::vector<int64_t>& keys) {
    std::unique_lock lock(mutex_);
    std::vector<int64_t> come;
    arrived_.wait(lock, [&] {
        for (int64_t key : keys)
            if (done_.count(key)) come.push_back(key);
        return !come.empty();
    });
    return come;
}

bool Reader::arrived(int64_t key) {
    std::lock_guard lock(mutex_);
    return done_.count(key);
}

void Reader::close() {
    {
        std::lock_guard lock(mutex_);
        closed_ = true;
        for (auto* queue : {&queue_, &behind_}) {
            const std::deque<Job*> left = std::move(*queue);
            queue->clear();
            for (Job* job : left) {
                if (!job->problem) job->problem = {0, End::FAILED, "the link was closed"};
                if (!job->under_way) end(job);
            }
        }
        wanted_.notify_all();
        check_.notify_all();
    }
    for (std::thread& thread : threads_)
        if (thread.joinable()) thread.join();
}

std::optional<Reader::Want> Reader::unchecked() {
    std::unique_lock lock(mutex_);
    check_.wait(lock, [&] { return closed_ || !unchecked_.empty(); });
    if (unchecked_.empty()) return {};
    const Want want = unchecked_.front();
    unchecked_.pop_front();
    return want;
}

void Reader::checked(int64_t key, const std::string& why) {
    std::lock_guard lock(mutex_);
    const auto found = jobs_.find(key);
    if (found == jobs_.end()) return;
    Job* job = found->second.get();
    if (!why.empty()) job->problem = {0, End::FAILED, why};
    job->under_way--;
    end(job);
}

int64_t Reader::here(int64_t key) const {
    if (const auto done = done_.find(key); done != done_.end()) return done->second.end == End::WHOLE ? shelf_.record : -1;
    const auto found = jobs_.find(key);
    if (found == jobs_.end()) return -1;
    return found->second->want.check ? 0 : std::min(shelf_.record, found->second->reach * shelf_.piece);
}

int64_t Reader::beyond(int64_t key, int64_t bytes) {
    std::unique_lock lock(mutex_);
    int64_t found = 0;
    arrived_.wait(lock, [&] { return (found = here(key)) < 0 || found > std::min(bytes, shelf_.record - 1); });
    return found;
}

std::vector<int64_t> Reader::reach(const std::vector<int64_t>& keys) {
    std::lock_guard lock(mutex_);
    std::vector<int64_t> all;
    for (int64_t key : keys) all.push_back(here(key));
    return all;
}

int64_t Reader::bytes() {
    std::lock_guard lock(mutex_);
    return bytes_;
}

double Reader::busy_s() {
    std::lock_guard lock(mutex_);
    return busy_s_;
}

std::vector<Reader::Read> Reader::reads() {
    std::lock_guard lock(mutex_);
    std::vector<Read> all(reads_.begin(), reads_.end());
    reads_.clear();
    return all;
}

void Reader::work() {
    short_slices();
    std::vector<uint8_t> own;
    std::unique_lock lock(mutex_);
    for (;;) {
        wanted_.wait(lock, [&] { return closed_ || can_begin(); });
        if (!one(lock, own)) return;
    }
}

bool Reader::step() {
    std::vector<uint8_t> own;
    std::unique_lock lock(mutex_);
    return one(lock, own);
}

// What is behind comes a piece or two at a time: it takes little from the last pieces of what is needed, and whoever turns out to
// be needed instead waits for no more than that.
bool Reader::can_begin() const { return !queue_.empty() || (!behind_.empty() && active_ < shelf_.ahead); }

// The next piece; false: there is none.
bool Reader::one(std::unique_lock<std::mutex>& lock, std::vector<uint8_t>& own) {
    if (!can_begin()) return false;
    Job* job = (queue_.empty() ? behind_ : queue_).front();
    const int64_t piece = job->next++;
    if (job->next == pieces_) drop(job);
    const double began = now();
    if (!active_) since_ = began;
    active_++, job->under_way++;
    const Want want = job->want;
    lock.unlock();
    int64_t size = 0;
    const std::string why = read(want, piece, own, size);
    lock.lock();
    const double ended = now();
    active_--;
    busy_s_ += ended - since_, since_ = ended;
    if (reads_.size() == KEPT) reads_.pop_front();
    reads_.push_back({began, ended, want.key});
    landed(job, piece, size, why);
    if (!behind_.empty() && can_begin()) wanted_.notify_one();
    return true;
}

void Reader::landed(Job* job, int64_t piece, int64_t size, const std::string& why) {
    bytes_ += size;
    if (!why.empty()) {
        job->problem = {0, End::FAILED, why};
        drop(job);
    } else {
        job->there[piece] = true;
        while (job->reach < pieces_ && job->there[job->reach]) job->reach++;
    }
    bool whole = !job->problem && job->reach == pieces_;
    if (whole && job->want.check && closed_) { // who checks may have gone home
        job->problem = {0, End::FAILED, "the link was closed"};
        whole = false;
    }
    if (whole && job->want.check) { // stays under way: it cannot be taken back any more
        unchecked_.push_back(job->want);
        check_.notify_one();
        return;
    }
    job->under_way--;
    if (!job->under_way && (whole || job->problem))
        end(job);
    else
        arrived_.notify_all();
}

// Of one piece, to where it belongs; returns what went wrong.
std::string Reader::read(const Want& want, int64_t piece, std::vector<uint8_t>& own, int64_t& size) {
    const int64_t begin = piece * shelf_.piece, end = std::min(shelf_.record, begin + shelf_.piece);
    iovec into[2];
    int parts = 0;
    int64_t at = 0, used = 0;
    for (int i = 0; i < 2; i++) {
        const int64_t low = std::max<int64_t>(0, begin - at), high = std::min(shelf_.bytes[i], end - at);
        if (low < high) into[parts++] = {shelf_.base[i] + want.slot * shelf_.bytes[i] + low, (size_t)(high - low)}, used += high - low;
        at += shelf_.bytes[i];
    }
    iovec whole{nullptr, (size_t)(end - begin)};
    const bool direct = direct_ && used == end - begin;
    if (!direct) {
        if (own.empty()) own.resize(shelf_.piece + BLOCK);
        whole.iov_base = own.data() + (BLOCK - (uintptr_t)own.data() % BLOCK) % BLOCK;
    }
    ssize_t got;
    do got = preadv(shelf_.file, direct ? into : &whole, direct ? parts : 1, want.offset + begin);
    while (got < 0 && errno == EINTR);
    const std::string where = " bytes at " + std::to_string(want.offset + begin);
    if (got < 0) return std::string(std::strerror(errno)) + ", reading " + std::to_string(end - begin) + where;
    if (got != end - begin) return "read " + std::to_string(got) + " of " + std::to_string(end - begin) + where;
    const uint8_t* from = (const uint8_t*)whole.iov_base;
    for (int i = 0; !direct && i < parts; i++) std::memcpy(into[i].iov_base, from, into[i].iov_len), from += into[i].iov_len;
    size = used;
    return {};
}

void Reader::end(Job* job) {
    const int64_t key = job->want.key;
    Ended ended = job->problem.value_or(Ended{0, End::WHOLE, ""});
    ended.when = now();
    done_[key] = ended;
    jobs_.erase(key);
    arrived_.notify_all();
}

// No further piece of it begins.
void Reader::drop(Job* job) {
    for (auto* queue : {&queue_, &behind_}) queue->erase(std::remove(queue->begin(), queue->end(), job), queue->end());
}
