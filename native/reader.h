// Experts of a packed file, read into slots piece by piece by threads of their own: a read begins when it is asked for and ends
// without waiting for Python's lock, and kernels may compute on the pieces of an expert that are there.
//
// What is read when is decided as in `engine/experts/link.py`; which expert goes where is not decided here. Methods may be called
// from several threads.
#pragma once
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

// Where an expert lies in the file, and its two matrices in slots. A record is the first matrix, the second, then padding.
struct Shelf {
    int file;
    int64_t record;   // bytes
    int64_t bytes[2]; // of its matrices
    uint8_t* base[2]; // of slot 0; slots follow each other
    int64_t slots;
    int64_t piece;    // bytes of one read, at most
    int ahead;        // reads at once of what is behind everything else, and only while no more than so many are under way
};

class Reader {
public:
    struct Want {
        int64_t key, offset, slot;
        bool check; // nobody is told that it is there before `checked` said so
    };
    enum class End { WHOLE, TAKEN_BACK, FAILED };
    struct Ended {
        double when; // seconds of CLOCK_MONOTONIC
        End end;
        std::string why;
    };
    struct Read {
        double began, ended;
        int64_t key;
    };

    // threads 0: whoever calls `step` reads.
    Reader(const Shelf& shelf, int threads);
    ~Reader() { close(); }
    Reader(const Reader&) = delete;
    Reader& operator=(const Reader&) = delete;
    const Shelf& shelf() const { return shelf_; }

    void submit(const std::vector<Want>& wants, bool behind);
    void hurry(const std::vector<int64_t>& keys);
    std::vector<int64_t> cancel(const std::vector<int64_t>& keys);
    Ended wait(int64_t key);
    std::vector<int64_t> first(const std::vector<int64_t>& keys);
    bool arrived(int64_t key);
    void close();
    bool step(); // reads the next piece, if there is one

    std::optional<Want> unchecked(); // waits for an expert to be checked; none: it was closed
    void checked(int64_t key, const std::string& why); // why: empty, or what is wrong with it

    // Waits until more than `bytes` of the beginning of an expert are there; returns how many. -1: they will not come.
    int64_t beyond(int64_t key, int64_t bytes);
    // Of experts that were submitted and not waited for: how many bytes of each are there; -1: they will not come.
    std::vector<int64_t> reach(const std::vector<int64_t>& keys);

    int64_t bytes();
    double busy_s();              // in which at least one read was under way
    std::vector<Read> reads();    // those that ended since the last call; the latest of many

private:
    struct Job {
        Want want;
        int64_t next = 0, under_way = 0; // pieces
        int64_t reach = 0;               // pieces from the beginning that are there
        std::vector<bool> there;
        std::optional<Ended> problem; // no further piece begins
    };
    void work();
    bool can_begin() const;
    bool one(std::unique_lock<std::mutex>& lock, std::vector<uint8_t>& own);
    std::string read(const Want& want, int64_t piece, std::vector<uint8_t>& own, int64_t& size);
    void landed(Job* job, int64_t piece, int64_t size, const std::string& why);
    void end(Job* job);
    void drop(Job* job);
    int64_t here(int64_t key) const;

    const Shelf shelf_;
    const int64_t pieces_;
    const bool direct_; // reads go straight into slots
    std::mutex mutex_;
    std::condition_variable wanted_, arrived_, check_;
    std::deque<Job*> queue_, behind_; // pieces of these are yet to begin; of those behind, when there is nothing else
    std::deque<Want> unchecked_;
    std::unordered_map<int64_t, std::unique_ptr<Job>> jobs_; // all that have not ended
    std::unordered_map<int64_t, Ended> done_;
    std::deque<Read> reads_;
    bool closed_ = false;
    int active_ = 0;
    double since_ = 0, busy_s_ = 0;
    int64_t bytes_ = 0;
    std::vector<std::thread> threads_;
};
