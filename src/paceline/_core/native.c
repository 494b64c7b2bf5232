/* Barriers, and sums of arrays, of the processes of a host that share memory: what Python's calls would cost most.

   It reads and writes the shared memory that `paceline.backends.shm.control_block` lays out, in the order in which the
   Python code does, so processes with and without it work together. It needs CPython's stable ABI and Linux alone.

   A barrier: add 1 to the count of arrivals, which the last rank makes a multiple of the number of ranks; until then
   poll, yield the core, then sleep on a futex. A sleeper wakes every 100 ms and calls back into Python, which finds out
   whether a rank has ended. Ranks that meet on one core while others are free part: see `spread`.

   Sums are added along the tree of `paceline._core.summation_tree`: (x0 + x1) + (x2 + x3), in blocks that stay in the
   cache. */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#define _GNU_SOURCE
#include <Python.h>

#include "native_calls.h"

#include <linux/futex.h>
#include <sched.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <emmintrin.h>
#endif

#define SLEEP_NS 100000000L
#define MOVE_NS 500000          /* between two moves of a rank to another core */
#define BLOCK_NBYTES 16384      /* of one input */
#define RELEASE_NBYTES (128 << 10) /* from this size on other threads may run meanwhile */
#define SCRATCH_BLOCKS 64       /* a level of the tree takes two: enough for any number of ranks */
#define STREAM_NBYTES 8192      /* shorter copies never pass the caches */
#define SLOW_COPY 10            /* an ordinary copy is slow if it takes so many times as long as one past the caches */
#define SLOW_COPIES 10          /* so many slow ones in a row: the next ones pass the caches */
#define STREAMED_COPIES 2000    /* so many of them, then an ordinary copy is tried again */
#define FIRST_COPIES 16         /* that pass the caches, to measure them */
#define CALL_NBYTES 16

#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define FOR_EACH_CPU __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define FOR_EACH_CPU
#endif

/* An output is an input, or overlaps none: an iteration never reads what another one writes. */
#if defined(__GNUC__) && !defined(__clang__)
#define IN_PLACE _Pragma("GCC ivdep")
#else
#define IN_PLACE
#endif

static inline void pause_core(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* ---------------------------------------------------------------------------------------------- sums of arrays */

enum { FLOAT32, FLOAT64, INT32, INT64, KINDS };
static const size_t ITEM_NBYTES[KINDS] = {4, 8, 4, 8};

#define DEFINE_SUMS(name, type)                                                                                 \
    FOR_EACH_CPU static void add2_##name(type *out, const type *a, const type *b, size_t n) {                   \
        IN_PLACE for (size_t i = 0; i < n; i++) out[i] = a[i] + b[i];                                           \
    }                                                                                                           \
    FOR_EACH_CPU static void add4_##name(                                                                       \
        type *out, const type *a, const type *b, const type *c, const type *d, size_t n) {                      \
        IN_PLACE for (size_t i = 0; i < n; i++) out[i] = (a[i] + b[i]) + (c[i] + d[i]);                         \
    }
DEFINE_SUMS(f32, float)
DEFINE_SUMS(f64, double)
DEFINE_SUMS(u32, uint32_t) /* integers wrap around, as torch's do */
DEFINE_SUMS(u64, uint64_t)

#define DEFINE_DIVISION(name, type)                                                                             \
    FOR_EACH_CPU static void divide_##name(type *out, type divisor, size_t n) {                                 \
        IN_PLACE for (size_t i = 0; i < n; i++) out[i] = out[i] / divisor;                                      \
    }
DEFINE_DIVISION(f32, float)
DEFINE_DIVISION(f64, double)

static void add2(int kind, void *out, const void *a, const void *b, size_t n) {
    if (kind == FLOAT32) add2_f32(out, a, b, n);
    else if (kind == FLOAT64) add2_f64(out, a, b, n);
    else if (kind == INT32) add2_u32(out, a, b, n);
    else add2_u64(out, a, b, n);
}

static void add4(int kind, void *out, const char *const *in, size_t n) {
    if (kind == FLOAT32) add4_f32(out, (void *)in[0], (void *)in[1], (void *)in[2], (void *)in[3], n);
    else if (kind == FLOAT64) add4_f64(out, (void *)in[0], (void *)in[1], (void *)in[2], (void *)in[3], n);
    else if (kind == INT32) add4_u32(out, (void *)in[0], (void *)in[1], (void *)in[2], (void *)in[3], n);
    else add4_u64(out, (void *)in[0], (void *)in[1], (void *)in[2], (void *)in[3], n);
}

static void divide(int kind, void *out, int64_t divisor, size_t n) {
    if (divisor > 1 && kind == FLOAT32) divide_f32(out, (float)divisor, n);
    if (divisor > 1 && kind == FLOAT64) divide_f64(out, (double)divisor, n);
}

/* Add one block of `count` inputs along the tree into `out`, which may be one of them: it is written last. `scratch`
   has two blocks for each level below. */
static void add_tree(int kind, void *out, const char *const *in, size_t count, size_t n, char *scratch) {
    if (count == 2) { add2(kind, out, in[0], in[1], n); return; }
    if (count == 4) { add4(kind, out, in, n); return; }
    size_t middle = 1;
    while (middle * 2 < count) middle *= 2;
    const char *left = in[0], *right = in[middle];
    if (middle > 1) {
        add_tree(kind, scratch, in, middle, n, scratch + BLOCK_NBYTES);
        left = scratch;
        scratch += BLOCK_NBYTES;
    }
    if (count - middle > 1) {
        add_tree(kind, scratch, in + middle, count - middle, n, scratch + BLOCK_NBYTES);
        right = scratch;
    }
    add2(kind, out, left, right, n);
}

/* Copy past the caches. Where other ranks have read before, their cores still have the old numbers in their caches,
   from which an ordinary copy takes them back line by line. */
static void stream(char *to, const char *from, size_t nbytes) {
    size_t done = 0;
#if defined(__x86_64__)
    if (nbytes >= STREAM_NBYTES && (uintptr_t)to % 16 == 0) {
        for (; done + 64 <= nbytes; done += 64) {
            __m128i lines[4];
            memcpy(lines, from + done, sizeof lines);
            for (int part = 0; part < 4; part++) _mm_stream_si128((__m128i *)(to + done) + part, lines[part]);
        }
        _mm_sfence();
    }
#endif
    memcpy(to + done, from + done, nbytes - done);
}

/* ------------------------------------------------------------------------------------------- ranks of one host */

/* Copies to another rank: the time of a byte past the caches at best (0: not measured yet), ordinary copies in a row
   that were slow, and how many of the next ones are to pass the caches. */
typedef struct {
    double stream_ns;
    unsigned slow, to_stream;
} Peer;

typedef struct {
    PyObject_HEAD
    char *base;
    size_t index, size, share;
    /* offsets and sizes in the shared memory, see control_block.py */
    size_t arrivals, sleepers, failed, slots, slot_nbytes, progress, core, notices_nbytes;
    size_t buffers, buffers_nbytes, eager_nbytes, staging_nbytes;
    int64_t spin_ns, yield_ns, moved;
    Peer *peers;
    char *scratch;
    const char **inputs;
    char **outputs;
} Ranks;

static uint32_t *word(Ranks *self, size_t offset) { return (uint32_t *)(self->base + offset); }
static char *slot(Ranks *self, size_t rank) { return self->base + self->slots + rank * self->slot_nbytes; }
static char *buffers(Ranks *self, size_t rank) { return self->base + self->buffers + rank * self->buffers_nbytes; }

static char *eager(Ranks *self, size_t rank, unsigned turn) {
    return buffers(self, rank) + self->eager_nbytes * (turn & 1);
}
static char *staging(Ranks *self, size_t rank, size_t part) {
    return buffers(self, rank) + 2 * self->eager_nbytes + self->staging_nbytes * (part & 1);
}
static char *result(Ranks *self, size_t rank, size_t part) {
    return buffers(self, rank) + 2 * self->eager_nbytes + self->staging_nbytes * (2 + (part & 1));
}

/* Copy many numbers to where another rank reads next. It is faster if it finds them in this core's cache, unless
   transfers between the two cores are slow: then both are faster past the caches. Where a virtual machine is moved
   about, that changes while it runs, so the copies themselves are timed. */
static void share(Peer *peer, char *to, const char *from, size_t nbytes) {
    if (nbytes < STREAM_NBYTES) {
        memcpy(to, from, nbytes);
        return;
    }
    int64_t start = now_ns();
    if (peer->to_stream > 0) {
        stream(to, from, nbytes);
        double ns = (double)(now_ns() - start) / (double)nbytes;
        if (peer->stream_ns == 0 || ns < peer->stream_ns) peer->stream_ns = ns;
        peer->to_stream--;
        return;
    }
    memcpy(to, from, nbytes);
    int slow = (double)(now_ns() - start) > SLOW_COPY * peer->stream_ns * (double)nbytes;
    peer->slow = slow ? peer->slow + 1 : 0;
    if (peer->slow < SLOW_COPIES) return;
    *peer = (Peer){.to_stream = STREAMED_COPIES};
}

/* Whether a copy that all ranks read is faster past the caches. */
static int has_slow_peer(Ranks *self) {
    for (size_t rank = 0; rank < self->size; rank++)
        if (rank != self->index && self->peers[rank].to_stream > 0) return 1;
    return 0;
}

static int arrived(uint32_t *arrivals, uint32_t target) {
    return (int32_t)(__atomic_load_n(arrivals, __ATOMIC_ACQUIRE) - target) >= 0;
}

/* Call `attend(seconds)`: −1 if all ranks have arrived, but one has failed. */
static int call_attend(PyObject *attend, double seconds) {
    PyObject *done = PyObject_CallFunction(attend, "d", seconds);
    if (done == NULL) return -1;
    Py_DECREF(done);
    return 0;
}

/* Ranks on a core (its number + 1; 0: unknown), as of their latest barriers, and the last of them. */
static size_t ranks_on(Ranks *self, uint32_t core, size_t *last) {
    size_t count = 0;
    for (size_t rank = 0; rank < self->size; rank++)
        if (__atomic_load_n((uint32_t *)(slot(self, rank) + self->core), __ATOMIC_RELAXED) == core) {
            count++;
            *last = rank;
        }
    return count;
}

/* Move this rank, if it is the last one on a core that has more ranks than its share, to the core that has the fewest:
   ranks that yield to each other look busy, so the kernel would leave them for many milliseconds. The thread may still
   run on every core that it might run on before. */
static void spread(Ranks *self, int64_t now) {
    uint32_t *own = (uint32_t *)(slot(self, self->index) + self->core);
    size_t last = self->size, other, best = ranks_on(self, *own, &last) - 1;
    cpu_set_t allowed, chosen;
    int core = -1;
    if (best < self->share || last != self->index || now - self->moved < MOVE_NS) return;
    if (sched_getaffinity(0, sizeof allowed, &allowed) < 0) return;
    for (int each = 0; each < CPU_SETSIZE; each++) {
        size_t count = CPU_ISSET(each, &allowed) ? ranks_on(self, (uint32_t)each + 1, &other) : best;
        if (count < best) { best = count; core = each; }
    }
    if (core < 0) return;
    self->moved = now;
    CPU_ZERO(&chosen);
    CPU_SET(core, &chosen);
    if (sched_setaffinity(0, sizeof chosen, &chosen) < 0) return;
    sched_setaffinity(0, sizeof allowed, &allowed);
    __atomic_store_n(own, (uint32_t)core + 1, __ATOMIC_RELAXED);
}

static int wait_asleep(Ranks *self, uint32_t target, int64_t start, PyObject *attend) {
    uint32_t *arrivals = word(self, self->arrivals), *sleepers = word(self, self->sleepers);
    const struct timespec limit = {0, SLEEP_NS};
    while (1) {
        Py_BEGIN_ALLOW_THREADS
        __atomic_fetch_add(sleepers, 1, __ATOMIC_SEQ_CST);
        uint32_t seen = __atomic_load_n(arrivals, __ATOMIC_SEQ_CST);
        if ((int32_t)(seen - target) < 0) syscall(SYS_futex, arrivals, FUTEX_WAIT, seen, &limit, NULL, 0);
        __atomic_fetch_sub(sleepers, 1, __ATOMIC_SEQ_CST);
        Py_END_ALLOW_THREADS
        if (arrived(arrivals, target)) return 0;
        if (call_attend(attend, (double)(now_ns() - start) * 1e-9) < 0) return -1;
        if (arrived(arrivals, target)) return 0;
    }
}

/* Arrive at the next barrier, and return 0 when all ranks have arrived; −1 with an exception. */
static int wait_all(Ranks *self, PyObject *attend) {
    uint32_t *arrivals = word(self, self->arrivals);
    uint32_t *progress = (uint32_t *)(slot(self, self->index) + self->progress);
    uint32_t number = __atomic_load_n(progress, __ATOMIC_RELAXED) + 1;
    uint32_t target = number * (uint32_t)self->size;
    uint32_t *core = (uint32_t *)(slot(self, self->index) + self->core);
    __atomic_store_n(core, (uint32_t)sched_getcpu() + 1, __ATOMIC_RELAXED);
    __atomic_store_n(progress, number, __ATOMIC_RELEASE);
    uint32_t count = __atomic_add_fetch(arrivals, 1, __ATOMIC_SEQ_CST);
    if ((int32_t)(count - target) >= 0) {
        if (__atomic_load_n(word(self, self->sleepers), __ATOMIC_SEQ_CST))
            syscall(SYS_futex, arrivals, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
    } else {
        int64_t start = now_ns();
        int here = 0;
        while (!here && now_ns() - start < self->spin_ns)
            for (int poll = 0; poll < 32 && !(here = arrived(arrivals, target)); poll++) pause_core();
        if (!here) spread(self, start);
        while (!here && now_ns() - start < self->yield_ns) {
            sched_yield();
            here = arrived(arrivals, target);
        }
        if (!here && wait_asleep(self, target, start, attend) < 0) return -1;
    }
    if (__atomic_load_n(word(self, self->failed), __ATOMIC_ACQUIRE)) return call_attend(attend, -1.0);
    return 0;
}

/* Post a notice, wait for all ranks; 1: all calls are equal, 0: they are not, −1: exception. */
static int start(Ranks *self, unsigned turn, const char *call, int32_t segment, int64_t offset, PyObject *attend) {
    size_t at = self->notices_nbytes * (turn & 1);
    char *notice = slot(self, self->index) + at;
    memcpy(notice, call, CALL_NBYTES);
    memcpy(notice + CALL_NBYTES, &segment, sizeof segment);
    memcpy(notice + CALL_NBYTES + sizeof segment, &offset, sizeof offset);
    if (wait_all(self, attend) < 0) return -1;
    for (size_t rank = 0; rank < self->size; rank++)
        if (memcmp(slot(self, rank) + at, call, CALL_NBYTES)) return 0;
    return 1;
}

/* Add `size` inputs into `out`, block by block, and copy each block into the `copies` outputs, past the caches if it
   `streams`. */
static int add_blocks(
    Ranks *self, int kind, char *out, size_t numel, int64_t divisor, size_t copies, int streams, PyObject *attend) {
    size_t step = BLOCK_NBYTES / ITEM_NBYTES[kind], item = ITEM_NBYTES[kind];
    const char *block[self->size];
    PyThreadState *thread = numel * item >= RELEASE_NBYTES ? PyEval_SaveThread() : NULL;
    int failed = 0;
    for (size_t low = 0; low < numel && !failed; low += step) {
        size_t n = numel - low < step ? numel - low : step;
        for (size_t rank = 0; rank < self->size; rank++) block[rank] = self->inputs[rank] + low * item;
        if (self->size > 1) add_tree(kind, out + low * item, block, self->size, n, self->scratch);
        else if (out != self->inputs[0]) memcpy(out + low * item, block[0], n * item);
        divide(kind, out + low * item, divisor, n);
        if (copies && attend != NULL && __atomic_load_n(word(self, self->failed), __ATOMIC_RELAXED)) {
            /* another rank may keep something else there by now */
            if (thread != NULL) PyEval_RestoreThread(thread);
            failed = call_attend(attend, 0.0) < 0;
            thread = thread != NULL ? PyEval_SaveThread() : NULL;
            if (failed) break;
        }
        for (size_t copy = 0; copy < copies; copy++)
            if (streams) stream(self->outputs[copy] + low * item, out + low * item, n * item);
            else memcpy(self->outputs[copy] + low * item, out + low * item, n * item);
    }
    if (thread != NULL) PyEval_RestoreThread(thread);
    return failed ? -1 : 0;
}

/* ------------------------------------------------------------------------------------------------ Python's view */

static size_t as_size(PyObject *value) { return PyLong_AsSize_t(value); }
static char *as_address(PyObject *value) { return PyLong_AsVoidPtr(value); }

static int expects(Py_ssize_t given, Py_ssize_t wanted) {
    if (given == wanted) return 1;
    PyErr_Format(PyExc_TypeError, "%zd arguments instead of %zd", given, wanted);
    return 0;
}

static int is_kind(size_t kind) {
    if (kind < KINDS) return 1;
    PyErr_SetString(PyExc_ValueError, "no kind of numbers");
    return 0;
}

static const char *as_call(PyObject *value) {
    if (!PyBytes_Check(value) || PyBytes_Size(value) != CALL_NBYTES) {
        PyErr_SetString(PyExc_TypeError, "a call is 16 bytes");
        return NULL;
    }
    return PyBytes_AsString(value);
}

static PyObject *ranks_wait(Ranks *self, PyObject *const *args, Py_ssize_t count) {
    if (!expects(count, 1) || wait_all(self, args[0]) < 0) return NULL;
    Py_RETURN_NONE;
}

static PyObject *ranks_start(Ranks *self, PyObject *const *args, Py_ssize_t count) {
    const char *call;
    if (!expects(count, 5) || (call = as_call(args[1])) == NULL) return NULL;
    unsigned turn = (unsigned)as_size(args[0]);
    int32_t segment = (int32_t)PyLong_AsLong(args[2]);
    int64_t offset = PyLong_AsLongLong(args[3]);
    if (PyErr_Occurred()) return NULL;
    int same = start(self, turn, call, segment, offset, args[4]);
    return same < 0 ? NULL : PyBool_FromLong(same);
}

static PyObject *ranks_all_reduce_eager(Ranks *self, PyObject *const *args, Py_ssize_t count) {
    const char *call;
    if (!expects(count, 7) || (call = as_call(args[1])) == NULL) return NULL;
    unsigned turn = (unsigned)as_size(args[0]);
    char *address = as_address(args[2]);
    size_t numel = as_size(args[3]), kind = as_size(args[4]);
    int64_t divisor = PyLong_AsLongLong(args[5]);
    if (PyErr_Occurred()) return NULL;
    if (kind >= KINDS || numel * ITEM_NBYTES[kind] > self->eager_nbytes) {
        PyErr_SetString(PyExc_ValueError, "no eager data");
        return NULL;
    }
    stream(eager(self, self->index, turn), address, numel * ITEM_NBYTES[kind]);
    int same = start(self, turn, call, -1, 0, args[6]);
    if (same <= 0) return same < 0 ? NULL : PyBool_FromLong(0);
    for (size_t rank = 0; rank < self->size; rank++)
        self->inputs[rank] = rank == self->index ? address : eager(self, rank, turn);
    add_blocks(self, (int)kind, address, numel, divisor, 0, 0, NULL);
    return PyBool_FromLong(1);
}

static PyObject *ranks_add_eager(Ranks *self, PyObject *const *args, Py_ssize_t count) {
    if (!expects(count, 5)) return NULL;
    unsigned turn = (unsigned)as_size(args[0]);
    char *address = as_address(args[1]);
    size_t numel = as_size(args[2]), kind = as_size(args[3]);
    int64_t divisor = PyLong_AsLongLong(args[4]);
    if (PyErr_Occurred() || !is_kind(kind)) return NULL;
    for (size_t rank = 0; rank < self->size; rank++)
        self->inputs[rank] = rank == self->index ? address : eager(self, rank, turn);
    add_blocks(self, (int)kind, address, numel, divisor, 0, 0, NULL);
    Py_RETURN_NONE;
}

/* Slice `rank` of `size`: whole cache lines, as `slice_bounds` in shm_all_reduce.py. */
static void slice(size_t numel, size_t size, size_t rank, size_t *low, size_t *high) {
    size_t length = (numel + size * 64 - 1) / (size * 64) * 64;
    *low = rank * length < numel ? rank * length : numel;
    *high = (rank + 1) * length < numel ? (rank + 1) * length : numel;
}

static PyObject *ranks_all_reduce_direct(Ranks *self, PyObject *const *args, Py_ssize_t count) {
    if (!expects(count, 5)) return NULL;
    size_t numel = as_size(args[1]), kind = as_size(args[2]), low, high, copies = 0;
    int64_t divisor = PyLong_AsLongLong(args[3]);
    if (PyErr_Occurred()) return NULL;
    if (kind >= KINDS || !PyTuple_Check(args[0]) || PyTuple_Size(args[0]) != (Py_ssize_t)self->size) {
        PyErr_SetString(PyExc_ValueError, "an address per rank, and a kind of numbers");
        return NULL;
    }
    slice(numel, self->size, self->index, &low, &high);
    for (size_t rank = 0; rank < self->size; rank++) {
        char *address = as_address(PyTuple_GetItem(args[0], (Py_ssize_t)rank));
        if (PyErr_Occurred()) return NULL;
        address += low * ITEM_NBYTES[kind];
        self->inputs[rank] = address;
        if (rank != self->index) self->outputs[copies++] = address;
    }
    char *own = (char *)self->inputs[self->index];
    if (add_blocks(self, (int)kind, own, high - low, divisor, copies, 0, args[4]) < 0) return NULL;
    if (wait_all(self, args[4]) < 0) return NULL;
    Py_RETURN_NONE;
}

/* The steps of a part of a tensor outside of the arena, see `_run_staged` in shm_all_reduce.py. */
static PyObject *ranks_stage(Ranks *self, PyObject *const *args, Py_ssize_t count) {
    if (!expects(count, 4)) return NULL;
    size_t part = as_size(args[0]), numel = as_size(args[2]), item = as_size(args[3]), low, high;
    char *address = as_address(args[1]), *to = staging(self, self->index, part);
    if (PyErr_Occurred()) return NULL;
    PyThreadState *thread = numel * item >= RELEASE_NBYTES ? PyEval_SaveThread() : NULL;
    for (size_t rank = 0; rank < self->size; rank++) {
        slice(numel, self->size, rank, &low, &high);
        if (rank != self->index) share(self->peers + rank, to + low * item, address + low * item, (high - low) * item);
    }
    if (thread != NULL) PyEval_RestoreThread(thread);
    Py_RETURN_NONE;
}

static PyObject *ranks_reduce_staged(Ranks *self, PyObject *const *args, Py_ssize_t count) {
    if (!expects(count, 5)) return NULL;
    size_t part = as_size(args[0]), numel = as_size(args[2]), kind = as_size(args[3]), low, high;
    char *address = as_address(args[1]);
    int64_t divisor = PyLong_AsLongLong(args[4]);
    if (PyErr_Occurred() || !is_kind(kind)) return NULL;
    slice(numel, self->size, self->index, &low, &high);
    size_t at = low * ITEM_NBYTES[kind];
    for (size_t rank = 0; rank < self->size; rank++)
        self->inputs[rank] = (rank == self->index ? address : staging(self, rank, part)) + at;
    self->outputs[0] = result(self, self->index, part);
    add_blocks(self, (int)kind, address + at, high - low, divisor, 1, has_slow_peer(self), NULL);
    Py_RETURN_NONE;
}

static PyObject *ranks_take_results(Ranks *self, PyObject *const *args, Py_ssize_t count) {
    if (!expects(count, 4)) return NULL;
    size_t part = as_size(args[0]), numel = as_size(args[2]), item = as_size(args[3]), low, high;
    char *address = as_address(args[1]);
    if (PyErr_Occurred()) return NULL;
    PyThreadState *thread = numel * item >= RELEASE_NBYTES ? PyEval_SaveThread() : NULL;
    for (size_t distance = 1; distance < self->size; distance++) {
        size_t rank = (self->index + distance) % self->size;
        slice(numel, self->size, rank, &low, &high);
        memcpy(address + low * item, result(self, rank, part), (high - low) * item);
    }
    if (thread != NULL) PyEval_RestoreThread(thread);
    Py_RETURN_NONE;
}

static PyMethodDef ranks_methods[] = {
    {"wait", (PyCFunction)(void (*)(void))ranks_wait, METH_FASTCALL, NULL},
    {"start", (PyCFunction)(void (*)(void))ranks_start, METH_FASTCALL, NULL},
    {"all_reduce_eager", (PyCFunction)(void (*)(void))ranks_all_reduce_eager, METH_FASTCALL, NULL},
    {"add_eager", (PyCFunction)(void (*)(void))ranks_add_eager, METH_FASTCALL, NULL},
    {"all_reduce_direct", (PyCFunction)(void (*)(void))ranks_all_reduce_direct, METH_FASTCALL, NULL},
    {"stage", (PyCFunction)(void (*)(void))ranks_stage, METH_FASTCALL, NULL},
    {"reduce_staged", (PyCFunction)(void (*)(void))ranks_reduce_staged, METH_FASTCALL, NULL},
    {"take_results", (PyCFunction)(void (*)(void))ranks_take_results, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static PyObject *ranks_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    Py_ssize_t base, index, size, share, layout[12];
    double spin, yield;
    (void)kwargs;
    if (!PyArg_ParseTuple(
            args, "nnnndd(nnnnnnnnnnnn)", &base, &index, &size, &share, &spin, &yield, layout, layout + 1, layout + 2,
            layout + 3, layout + 4, layout + 5, layout + 6, layout + 7, layout + 8, layout + 9, layout + 10, layout + 11))
        return NULL;
    Ranks *self = (Ranks *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (self == NULL) return NULL;
    self->base = (char *)base;
    self->index = (size_t)index;
    self->size = (size_t)size;
    self->share = (size_t)share;
    self->spin_ns = (int64_t)(spin * 1e9);
    self->yield_ns = (int64_t)(yield * 1e9);
    memcpy(&self->arrivals, layout, sizeof layout);
    self->peers = PyMem_Malloc(sizeof *self->peers * self->size);
    self->scratch = PyMem_Malloc(SCRATCH_BLOCKS * BLOCK_NBYTES);
    self->inputs = PyMem_Malloc(sizeof *self->inputs * self->size);
    self->outputs = PyMem_Malloc(sizeof *self->outputs * self->size);
    if (self->peers == NULL || self->scratch == NULL || self->inputs == NULL || self->outputs == NULL) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    for (size_t rank = 0; rank < self->size; rank++) self->peers[rank] = (Peer){.to_stream = FIRST_COPIES};
    return (PyObject *)self;
}

static void ranks_dealloc(Ranks *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    PyMem_Free(self->peers);
    PyMem_Free(self->scratch);
    PyMem_Free((void *)self->inputs);
    PyMem_Free(self->outputs);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyType_Slot ranks_slots[] = {
    {Py_tp_new, ranks_new},
    {Py_tp_dealloc, ranks_dealloc},
    {Py_tp_methods, ranks_methods},
    {0, NULL},
};
static PyType_Spec ranks_spec = {"paceline._core._native.Ranks", sizeof(Ranks), 0, Py_TPFLAGS_DEFAULT, ranks_slots};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_native", NULL, -1, NULL, NULL, NULL, NULL, NULL};

/* Add a type, and drop it; −1 with an exception. */
static int add_type(PyObject *to, const char *name, PyObject *type) {
    int added = type == NULL ? -1 : PyModule_AddObjectRef(to, name, type);
    Py_XDECREF(type);
    return added;
}

PyMODINIT_FUNC PyInit__native(void) {
    PyObject *made = PyModule_Create(&module);
    if (made == NULL) return NULL;
    if (add_type(made, "Ranks", PyType_FromSpec(&ranks_spec)) < 0 ||
        add_type(made, "SumReader", make_sum_reader()) < 0) {
        Py_DECREF(made);
        return NULL;
    }
    return made;
}
