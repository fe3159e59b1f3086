// Collectives and transfers between processes of one host, through shared memory.
//
// Each rank owns a shared memory region (box), which the other ranks of the host map and read. A region begins with a
// futex (Bell), with which other ranks wake the owner after changes that it may wait for. Then come the channels: one
// per process group (Lane), and one per peer rank for transfers (link). A channel is a ring buffer of slots. A rank
// copies a chunk of its tensor into a slot of its own region, and reads the same slot in the regions of the others. It
// may overwrite a slot when all others have read the slot.
//
// Sums of bf16 accumulate in float, in the order of the ranks, whatever the number of chunks: all ranks compute the
// same bits. There are no background threads: each call, and each wait, advances all operations of the process.

#include <linux/futex.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <vector>

namespace {

constexpr long kPage = 4096, kSlot = 1 << 20;
constexpr long kLanes = 64, kDepth = 4;        // channels of process groups, and slots per channel
constexpr long kLinkDepth = 32;                // slots of a channel to a peer rank; enough that sends seldom wait
constexpr long kLane = kPage + kDepth * kSlot, kLink = kPage + kLinkDepth * kSlot;
constexpr long kAwakeNs = 60000;               // a waiting rank polls, and yields its core, this long before it sleeps

struct Bell {
    alignas(64) std::atomic<uint32_t> rung;    // futex word: number of wakeups that other ranks have sent
    alignas(64) std::atomic<uint32_t> asleep;  // threads of the owner that sleep on the futex
    alignas(64) std::atomic<uint32_t> left;    // 1 when the owner has closed its exchange
};

struct Header {
    alignas(64) std::atomic<uint64_t> ready;   // chunks that the owner has written to its slots
    alignas(64) std::atomic<uint64_t> done;    // chunks that the owner has read from all others
    alignas(64) std::atomic<uint32_t> blocked; // 1 while the owner waits for others to read a slot
};

struct bf16 {
    uint16_t bits;
};
inline float wide(bf16 x) {
    uint32_t bits = uint32_t(x.bits) << 16;
    float out;
    std::memcpy(&out, &bits, 4);
    return out;
}
template <typename T> inline T wide(T x) { return x; }
inline void store(bf16& out, float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    out.bits = uint16_t(x != x ? 0x7fc0u : rounded);
}
template <typename T> inline void store(T& out, T x) { out = x; }

// Sum or maximum of pieces of the same length, in their order; NaN propagates. `out` may be one of the pieces.
template <typename T> void reduce(T* out, const std::vector<const char*>& pieces, long count, bool max, double scale) {
    using Wide = decltype(wide(T{}));
    constexpr long kBlock = 512;
    Wide total[kBlock];
    for (long from = 0; from < count; from += kBlock) {
        long size = std::min(kBlock, count - from);
        for (size_t r = 0; r < pieces.size(); ++r) {
            const T* piece = reinterpret_cast<const T*>(pieces[r]) + from;
            if (r == 0) {
                for (long i = 0; i < size; ++i) total[i] = wide(piece[i]);
            } else if (max) {
                for (long i = 0; i < size; ++i) {
                    Wide x = wide(piece[i]);
                    total[i] = total[i] < x || x != x ? x : total[i];
                }
            } else {
                for (long i = 0; i < size; ++i) total[i] += wide(piece[i]);
            }
        }
        if (scale != 1.0) {
            for (long i = 0; i < size; ++i) total[i] = Wide(total[i] * Wide(scale));
        }
        for (long i = 0; i < size; ++i) store(out[from + i], total[i]);
    }
}

enum Type { kBytes, kFloat, kBf16, kDouble, kInt64, kInt32 };
constexpr long kSize[] = {1, 4, 2, 8, 8, 4};

void reduce(int type, char* out, const std::vector<const char*>& pieces, long count, bool max, double scale) {
    switch (type) {
        case kFloat: return reduce(reinterpret_cast<float*>(out), pieces, count, max, scale);
        case kBf16: return reduce(reinterpret_cast<bf16*>(out), pieces, count, max, scale);
        case kDouble: return reduce(reinterpret_cast<double*>(out), pieces, count, max, scale);
        case kInt64: return reduce(reinterpret_cast<int64_t*>(out), pieces, count, max, scale);
        case kInt32: return reduce(reinterpret_cast<int32_t*>(out), pieces, count, max, scale);
    }
}

enum Kind { kGather, kScatter, kSum, kMax, kSend, kReceive };

// A collective or transfer in progress. `count` is the number of elements: of the output for a reduce-scatter
// (kScatter), of the input for the other kinds. A large sum or maximum (`in_two`) takes two chunks per part of the
// tensor: one for a reduce-scatter of the terms, and one for an all-gather of the results.
struct Operation {
    Kind kind;
    int type;
    const char* in;
    char* out;
    long count;
    double scale;
    bool in_two = false;
    long part = 0;    // elements of a chunk, or of a rank's piece of it if chunks have one piece per rank
    long chunks = 0, posted = 0, read = 0;

    bool complete() const { return (kind == kSend ? posted : read) == chunks; }
};

struct Lane {
    int me, size, depth;
    Header* mine;
    std::vector<Header*> theirs;  // headers of the members, by position; null for this rank
    std::vector<int> members;     // indices of the members in `Exchange::boxes`
    uint64_t posted = 0, read = 0;
    std::deque<Operation*> to_post, to_read;

    char* slot(int position, uint64_t chunk) const {
        Header* header = position == me ? mine : theirs[position];
        return reinterpret_cast<char*>(header) + kPage + long(chunk % depth) * kSlot;
    }
};

struct Exchange {
    int me;
    long box_bytes;
    std::vector<char*> boxes;
    std::vector<std::unique_ptr<Lane>> lanes;
    std::mutex mutex;

    Bell& bell(int place) { return *reinterpret_cast<Bell*>(boxes[place]); }

    void ring(int place) {
        Bell& at = bell(place);
        at.rung.fetch_add(1);
        if (at.asleep.load()) syscall(SYS_futex, &at.rung, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
    }

    bool has_room(const Lane& lane) const {
        for (Header* header : lane.theirs)
            if (header && header->done.load() + lane.depth <= lane.posted) return false;
        return true;
    }

    bool is_ready(const Lane& lane) const {
        for (Header* header : lane.theirs)
            if (header && header->ready.load(std::memory_order_acquire) <= lane.read) return false;
        return true;
    }

    void post_chunk(Lane& lane, Operation& op) {
        long es = kSize[op.type], index = op.posted, n = lane.size;
        char* slot = lane.slot(lane.me, lane.posted);
        if (op.kind == kScatter) {
            long from = index * op.part, size = std::min(op.part, op.count - from);
            for (long d = 0; d < n; ++d)
                if (d != lane.me)
                    std::memcpy(slot + d * op.part * es, op.in + (d * op.count + from) * es, size * es);
        } else if (op.in_two) {
            long from = index / 2 * op.part * n, size = std::min(op.part * n, op.count - from);
            long mine = lane.me * op.part, mine_end = std::min(mine + op.part, size);
            if (index % 2 == 0) {
                const char* in = op.in + from * es;
                if (mine > 0) std::memcpy(slot, in, std::min(mine, size) * es);
                if (mine_end < size) std::memcpy(slot + mine_end * es, in + mine_end * es, (size - mine_end) * es);
            } else if (mine < size) {
                std::memcpy(slot, op.out + (from + mine) * es, (mine_end - mine) * es);
            }
        } else {
            long from = index * op.part, size = std::min(op.part, op.count - from);
            std::memcpy(slot, op.in + from * es, size * es);
        }
    }

    void read_chunk(Lane& lane, Operation& op) {
        long es = kSize[op.type], index = op.read, n = lane.size;
        std::vector<const char*> pieces(n);
        if (op.kind == kReceive) {
            long from = index * op.part, size = std::min(op.part, op.count - from);
            std::memcpy(op.out + from * es, lane.slot(1 - lane.me, lane.read), size * es);
        } else if (op.kind == kGather) {
            long from = index * op.part, size = std::min(op.part, op.count - from);
            for (int r = 0; r < n; ++r) {
                const char* piece = r == lane.me ? op.in + from * es : lane.slot(r, lane.read);
                std::memcpy(op.out + (r * op.count + from) * es, piece, size * es);
            }
        } else if (op.kind == kScatter) {
            long from = index * op.part, size = std::min(op.part, op.count - from);
            for (int r = 0; r < n; ++r)
                pieces[r] = r == lane.me ? op.in + (lane.me * op.count + from) * es
                                         : lane.slot(r, lane.read) + lane.me * op.part * es;
            reduce(op.type, op.out + from * es, pieces, size, false, op.scale);
        } else if (op.in_two) {
            long from = index / 2 * op.part * n, size = std::min(op.part * n, op.count - from);
            long mine = lane.me * op.part, own = std::min(op.part, size - mine);
            if (index % 2 == 0) {
                for (int r = 0; r < n; ++r)
                    pieces[r] = (r == lane.me ? op.in + from * es : lane.slot(r, lane.read)) + mine * es;
                if (own > 0) reduce(op.type, op.out + (from + mine) * es, pieces, own, op.kind == kMax, op.scale);
            } else {
                for (int r = 0; r < n; ++r) {
                    long theirs = std::min(op.part, size - r * op.part);
                    if (r != lane.me && theirs > 0)
                        std::memcpy(op.out + (from + r * op.part) * es, lane.slot(r, lane.read), theirs * es);
                }
            }
        } else {
            long from = index * op.part, size = std::min(op.part, op.count - from);
            for (int r = 0; r < n; ++r) pieces[r] = r == lane.me ? op.in + from * es : lane.slot(r, lane.read);
            reduce(op.type, op.out + from * es, pieces, size, op.kind == kMax, op.scale);
        }
    }

    void post(Lane& lane) {
        while (!lane.to_post.empty()) {
            Operation& op = *lane.to_post.front();
            // Results are sent only after all terms are read.
            if (op.in_two && op.posted % 2 && op.read < op.posted) return;
            if (!has_room(lane)) {
                lane.mine->blocked.store(1);
                if (!has_room(lane)) return;
            }
            lane.mine->blocked.store(0, std::memory_order_relaxed);
            post_chunk(lane, op);
            lane.mine->ready.store(++lane.posted);
            for (int r = 0; r < lane.size; ++r)
                if (r != lane.me) ring(lane.members[r]);
            if (++op.posted == op.chunks) lane.to_post.pop_front();
        }
    }

    void read(Lane& lane) {
        while (!lane.to_read.empty() && is_ready(lane)) {
            Operation& op = *lane.to_read.front();
            if (op.kind != kReceive && op.read == op.posted) return;
            read_chunk(lane, op);
            lane.mine->done.store(++lane.read);
            for (int r = 0; r < lane.size; ++r)
                if (r != lane.me && lane.theirs[r]->blocked.load()) ring(lane.members[r]);
            if (++op.read == op.chunks) lane.to_read.pop_front();
            post(lane);
        }
    }

    void advance() {
        for (auto& lane : lanes) {
            post(*lane);
            read(*lane);
        }
    }
};

long now_ns() {
    timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return at.tv_sec * 1000000000L + at.tv_nsec;
}

}  // namespace

extern "C" {

// Size in bytes of the memory region of a rank, on a host with `ranks` ranks. Pages are allocated at first use.
long nx_box_bytes(int ranks) { return kPage + kLanes * kLane + ranks * kLink; }
int nx_lanes() { return kLanes; }

// Map the memory regions of all ranks of this host, from their file descriptors; null if one cannot be mapped.
void* nx_open_exchange(const int* files, int ranks, int me, long box_bytes) {
    auto exchange = std::make_unique<Exchange>();
    exchange->me = me;
    exchange->box_bytes = box_bytes;
    for (int place = 0; place < ranks; ++place) {
        int flags = MAP_SHARED | MAP_NORESERVE;
        void* box = mmap(nullptr, box_bytes, PROT_READ | PROT_WRITE, flags, files[place], 0);
        if (box == MAP_FAILED) {
            for (char* mapped : exchange->boxes) munmap(mapped, exchange->box_bytes);
            return nullptr;
        }
        exchange->boxes.push_back(static_cast<char*>(box));
    }
    return exchange.release();
}

void nx_close_exchange(void* handle) {
    std::unique_ptr<Exchange> exchange(static_cast<Exchange*>(handle));
    exchange->bell(exchange->me).left.store(1);
    for (int place = 0; place < int(exchange->boxes.size()); ++place)
        if (place != exchange->me) exchange->ring(place);
    for (char* box : exchange->boxes) munmap(box, exchange->box_bytes);
}

int nx_has_left(void* handle, int place) { return static_cast<Exchange*>(handle)->bell(place).left.load(); }

// Open the channel of a process group. `index` must be the same on all its ranks; `members` are indices in
// `Exchange::boxes`, in the order of the group.
void* nx_open_lane(void* handle, int index, const int* members, int size, int me) {
    auto* exchange = static_cast<Exchange*>(handle);
    auto lane = std::make_unique<Lane>();
    lane->me = me, lane->size = size, lane->depth = kDepth;
    lane->members.assign(members, members + size);
    for (int r = 0; r < size; ++r) {
        auto* header = reinterpret_cast<Header*>(exchange->boxes[members[r]] + kPage + index * kLane);
        lane->theirs.push_back(r == me ? nullptr : header);
        if (r == me) lane->mine = header;
    }
    std::lock_guard<std::mutex> lock(exchange->mutex);
    exchange->lanes.push_back(std::move(lane));
    return exchange->lanes.back().get();
}

// Open the channel for transfers with another rank of this host.
void* nx_open_link(void* handle, int peer) {
    auto* exchange = static_cast<Exchange*>(handle);
    auto lane = std::make_unique<Lane>();
    long links = kPage + kLanes * kLane;
    lane->me = 0, lane->size = 2, lane->depth = kLinkDepth;
    lane->members = {exchange->me, peer};
    lane->mine = reinterpret_cast<Header*>(exchange->boxes[exchange->me] + links + peer * kLink);
    lane->theirs = {nullptr, reinterpret_cast<Header*>(exchange->boxes[peer] + links + exchange->me * kLink)};
    std::lock_guard<std::mutex> lock(exchange->mutex);
    exchange->lanes.push_back(std::move(lane));
    return exchange->lanes.back().get();
}

// Start an operation. Its tensors must exist until it is complete.
void* nx_start(void* handle, void* on, int kind, int type, const void* in, void* out, long count, double scale) {
    auto* exchange = static_cast<Exchange*>(handle);
    auto* lane = static_cast<Lane*>(on);
    auto* op = new Operation{Kind(kind), type, static_cast<const char*>(in), static_cast<char*>(out), count, scale};
    long room = kSlot / kSize[type], n = lane->size;
    bool is_sum = op->kind == kSum || op->kind == kMax;
    op->in_two = is_sum && count * kSize[type] > 16384;
    op->part = op->kind == kScatter ? room / n
               : op->in_two         ? std::min(room / n, (count + n - 1) / n)
                                    : room;
    op->part = std::max(op->part, 1L);
    long all = op->in_two ? op->part * n : op->part;
    op->chunks = (count + all - 1) / all * (op->in_two ? 2 : 1);
    std::lock_guard<std::mutex> lock(exchange->mutex);
    if (op->chunks) {
        if (op->kind != kReceive) lane->to_post.push_back(op);
        if (op->kind != kSend) lane->to_read.push_back(op);
    }
    exchange->advance();
    return op;
}

// Wait for an operation: 1 if it is complete, and freed; 0 if it is still in progress after `limit_us`.
int nx_wait(void* handle, void* operation, long limit_us) {
    auto* exchange = static_cast<Exchange*>(handle);
    auto* op = static_cast<Operation*>(operation);
    Bell& bell = exchange->bell(exchange->me);
    long start = 0;
    for (;;) {
        uint32_t rung = bell.rung.load();
        {
            std::lock_guard<std::mutex> lock(exchange->mutex);
            exchange->advance();
            if (op->complete()) {
                delete op;
                return 1;
            }
        }
        long now = now_ns();
        if (!start) start = now;
        if (now - start < kAwakeNs) {
            sched_yield();
            continue;
        }
        long left = start + limit_us * 1000 - now;
        if (left <= 0) return 0;
        timespec most{left / 1000000000L, left % 1000000000L};
        bell.asleep.fetch_add(1);
        if (bell.rung.load() == rung) syscall(SYS_futex, &bell.rung, FUTEX_WAIT, rung, &most, nullptr, 0);
        bell.asleep.fetch_sub(1);
    }
}

// Index, in `Exchange::boxes`, of the first rank that an operation waits for; -1 if it waits for none.
int nx_missing(void* handle, void* on, void* operation) {
    auto* exchange = static_cast<Exchange*>(handle);
    auto* lane = static_cast<Lane*>(on);
    auto* op = static_cast<Operation*>(operation);
    std::lock_guard<std::mutex> lock(exchange->mutex);
    for (int r = 0; r < lane->size; ++r) {
        Header* header = lane->theirs[r];
        if (!header) continue;
        bool is_full = header->done.load() + lane->depth <= lane->posted;
        if (is_full || (op->kind != kSend && header->ready.load() <= lane->read)) return lane->members[r];
    }
    return -1;
}

}  // extern "C"
