/* libnccl without GPUs, for tests: processes of one machine, host pointers, shared memory.
 *
 * It keeps what the interface promises and demands: operations are asynchronous (a worker thread a communicator carries
 * them out in order), calls on a nonblocking communicator are in progress for a while, and a next call before that is
 * over is refused; groups are deferred; an abort wakes whatever waits and completes what was under way. It demands more
 * than NCCL does: concurrent calls on a communicator, ranks that make different calls, and handles used after they were
 * freed are errors. It proves nothing of streams (one is only a name under which operations are counted) or of speed.
 *
 * STUB_MINOR: the version 2.STUB_MINOR; functions that came later are left out.
 *
 * Environment:
 *   NCCL_STUB_FAIL=name:k:code   the k-th call of that function in this process returns code
 *   NCCL_STUB_ASYNC=k:code       a communicator's k-th operation is not carried out; code is its asynchronous error
 *   NCCL_STUB_HANG=name          that function never finishes
 *   NCCL_STUB_DRY=1              operations are complete at once and touch no memory
 *   NCCL_STUB_DIR=directory      of the shared segments (/dev/shm), which are unlinked once all ranks have mapped them
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#ifndef STUB_MINOR
#define STUB_MINOR 32
#endif
#define STUB_PATCH 3
#if STUB_MINOR <= 8
#define VERSION (2000 + 100 * STUB_MINOR + STUB_PATCH)
#else
#define VERSION (20000 + 100 * STUB_MINOR + STUB_PATCH)
#endif
#define SINCE(minor) (STUB_MINOR >= (minor))

enum { OK, CUDA_ERROR, SYSTEM_ERROR, INTERNAL_ERROR, BAD_ARGUMENT, BAD_USAGE, REMOTE_ERROR, IN_PROGRESS };
enum { I8, U8, I32, U32, I64, U64, F16, F32, F64, BF16, DTYPES };
enum { SUM, PROD, MAX, MIN, AVG, OPS };
enum { ALL_REDUCE, REDUCE, BROADCAST, ALL_GATHER, REDUCE_SCATTER, SEND, RECV, SPLIT, WINDOW, NO_WINDOW };

#define RANKS 8
#define CHUNK 65536
#define PREMULS 16
#define STREAMS 64
#define GROUP 1024
#define ALIVE 0x600df00du
#define BUSY_NS 200000 /* how long a nonblocking call stays in progress */

typedef struct { char internal[128]; } UniqueId;
typedef struct { size_t size; unsigned magic, version; int blocking, cga, min_ctas, max_ctas; } Config;

struct Header { int what, dtype, op, root; uint64_t count; };
struct Mail { _Atomic uint32_t full; uint32_t bytes; uint8_t data[CHUNK]; };
struct Segment {
    _Atomic int joined, arrived;
    _Atomic uint64_t generation;
    struct Header header[RANKS];
    uint8_t slot[RANKS][CHUNK];
    struct Mail mail[RANKS][RANKS]; /* of [source][destination] */
};

typedef struct { double f; int64_t i; } Number; /* i carries the bits of unsigned ones too */
struct Op {
    struct Header is; /* root: the peer of a send or recv */
    const uint8_t *send;
    uint8_t *recv;
    int stream;
    uint64_t done; /* bytes of a send or recv */
    Number factor; /* of a PreMulSum */
};
struct Comm;
struct Task {
    void (*run)(struct Comm *, struct Task *);
    struct Task *next;
    int color, key;
    struct Comm **made;
    int count;
    struct Op ops[];
};
struct Comm {
    unsigned alive;
    int rank, size, blocking, finalized, splits;
    char token[128];
    struct Segment *segment;
    pthread_t worker;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    struct Task *head, *tail;
    int closing; /* the worker ends when nothing is left to do */
    atomic_int stop; /* aborted: everything under way ends at once */
    atomic_int state; /* the asynchronous error */
    atomic_int waiting; /* calls that are complete when the worker has done their task */
    atomic_int inside; /* calls being made, the abort not among them */
    atomic_ullong busy_until;
    int operations;
    struct { int used, dtype; Number factor; } premul[PREMULS];
};

static _Thread_local int depth, grouped, group_error;
static _Thread_local struct { struct Comm *comm; struct Op op; } group[GROUP];
static char last_error[256];
static pthread_mutex_t globals = PTHREAD_MUTEX_INITIALIZER;
static atomic_int live, most_ctas;
static _Atomic uint64_t last_count;
static struct { void *name; atomic_ullong submitted, completed; } streams[STREAMS];
static int stream_count;

/* Small things ---------------------------------------------------------------------------------------------------- */

static uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void nap(void) {
    struct timespec t = {0, 50000};
    nanosleep(&t, NULL);
}

__attribute__((format(printf, 2, 3))) static int wrong(int code, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    pthread_mutex_lock(&globals);
    vsnprintf(last_error, sizeof last_error, format, arguments);
    pthread_mutex_unlock(&globals);
    va_end(arguments);
    return code;
}

static int injected(const char *name) {
    static atomic_int calls;
    const char *wish = getenv("NCCL_STUB_FAIL");
    size_t length = strlen(name);
    int number, code;
    if (!wish || strncmp(wish, name, length) || wish[length] != ':') return OK;
    if (sscanf(wish + length, ":%d:%d", &number, &code) != 2) abort();
    if (atomic_fetch_add(&calls, 1) + 1 != number) return OK;
    return wrong(code, "%s fails as the stub was told", name);
}

static int hangs(const char *name) {
    const char *wish = getenv("NCCL_STUB_HANG");
    return wish && !strcmp(wish, name);
}

static int stream_index(void *name) {
    int i;
    pthread_mutex_lock(&globals);
    for (i = 0; i < stream_count && streams[i].name != name; i++);
    if (i == stream_count) {
        if (i == STREAMS) abort();
        streams[i].name = name;
        stream_count++;
    }
    pthread_mutex_unlock(&globals);
    return i;
}

/* Numbers --------------------------------------------------------------------------------------------------------- */

static const size_t width[DTYPES] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};

static double from_half(uint16_t h) {
    int exponent = (h >> 10) & 31, mantissa = h & 1023;
    double x = exponent == 31 ? (mantissa ? NAN : INFINITY)
             : exponent ? ldexp(1024 + mantissa, exponent - 25) : ldexp(mantissa, -24);
    return h >> 15 ? -x : x;
}

static uint16_t to_half(double x) {
    uint16_t sign = signbit(x) ? 0x8000 : 0;
    double size = fabs(x);
    if (isnan(x)) return 0x7e00;
    if (size >= 65520) return sign | 0x7c00;
    if (size < ldexp(1, -14)) return sign | (uint16_t)nearbyint(ldexp(size, 24));
    int exponent = ilogb(size);
    /* A mantissa that is rounded up to 2048 carries into the exponent. */
    return sign + (uint16_t)(((exponent + 14) << 10) + (int)nearbyint(ldexp(size, 10 - exponent)));
}

static double from_bfloat(uint16_t b) {
    uint32_t bits = (uint32_t)b << 16;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

static uint16_t to_bfloat(double value) {
    float x = (float)value;
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if (isnan(x)) return 0x7fc0;
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

static Number load(const void *at, int dtype) {
    Number x = {0, 0};
    switch (dtype) {
#define LOAD(name, type, field) case name: { type v; memcpy(&v, at, sizeof v); x.field = v; break; }
        LOAD(I8, int8_t, i) LOAD(U8, uint8_t, i) LOAD(I32, int32_t, i) LOAD(U32, uint32_t, i)
        LOAD(I64, int64_t, i) LOAD(F32, float, f) LOAD(F64, double, f)
        case U64: memcpy(&x.i, at, 8); break;
        case F16: { uint16_t v; memcpy(&v, at, 2); x.f = from_half(v); break; }
        case BF16: { uint16_t v; memcpy(&v, at, 2); x.f = from_bfloat(v); break; }
    }
    return x;
}

static void store(void *at, int dtype, Number x) {
    switch (dtype) {
#define STORE(name, type, value) case name: { type v = (type)(value); memcpy(at, &v, sizeof v); break; }
        STORE(I8, int8_t, x.i) STORE(U8, uint8_t, x.i) STORE(I32, int32_t, x.i) STORE(U32, uint32_t, x.i)
        STORE(I64, int64_t, x.i) STORE(U64, uint64_t, x.i) STORE(F32, float, x.f) STORE(F64, double, x.f)
        STORE(F16, uint16_t, to_half(x.f)) STORE(BF16, uint16_t, to_bfloat(x.f))
    }
}

static Number combine(Number a, Number b, int op, int dtype) {
    uint64_t u = (uint64_t)a.i, v = (uint64_t)b.i;
    int less = dtype == U64 ? u < v : a.i < b.i;
    switch (op) {
        case PROD: return (Number){a.f * b.f, (int64_t)(u * v)};
        case MAX: return (Number){fmax(a.f, b.f), less ? b.i : a.i};
        case MIN: return (Number){fmin(a.f, b.f), less ? a.i : b.i};
        default: return (Number){a.f + b.f, (int64_t)(u + v)};
    }
}

static void reduce_slots(struct Comm *comm, const struct Op *op, uint8_t *out, size_t values) {
    const struct Header *is = &op->is;
    size_t step = width[is->dtype];
    for (size_t k = 0; k < values; k++) {
        Number total = {0, 0};
        for (int r = 0; r < comm->size; r++) {
            Number x = load(comm->segment->slot[r] + k * step, is->dtype);
            if (is->op >= OPS) {
                x.f *= op->factor.f;
                x.i = (int64_t)((uint64_t)x.i * (uint64_t)op->factor.i);
            }
            total = r ? combine(total, x, is->op, is->dtype) : x;
        }
        if (is->op == AVG) {
            total.f /= comm->size;
            total.i = is->dtype == U64 ? (int64_t)((uint64_t)total.i / (unsigned)comm->size) : total.i / comm->size;
        }
        store(out + k * step, is->dtype, total);
    }
}

/* Between ranks: each of these returns nonzero if the communicator was stopped ------------------------------------- */

static int pause_or_stop(struct Comm *comm, int *spins) {
    if (atomic_load(&comm->stop)) return 1;
    if (++*spins < 100) sched_yield();
    else nap();
    return 0;
}

static int meet(struct Comm *comm) {
    struct Segment *s = comm->segment;
    uint64_t generation = atomic_load(&s->generation);
    int spins = 0;
    if (atomic_fetch_add(&s->arrived, 1) + 1 == comm->size) {
        atomic_store(&s->arrived, 0);
        atomic_fetch_add(&s->generation, 1);
        return 0;
    }
    while (atomic_load(&s->generation) == generation)
        if (pause_or_stop(comm, &spins)) return 1;
    return 0;
}

static void segment_path(const char *token, char *path, size_t room) {
    const char *directory = getenv("NCCL_STUB_DIR");
    snprintf(path, room, "%s/%s", directory ? directory : "/dev/shm", token);
}

static int join_ranks(struct Comm *comm) {
    char path[512];
    int spins = 0;
    segment_path(comm->token, path, sizeof path);
    int file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (file < 0 || ftruncate(file, sizeof(struct Segment))) {
        atomic_store(&comm->state, wrong(SYSTEM_ERROR, "%s: %s", path, strerror(errno)));
        return 1;
    }
    comm->segment = mmap(NULL, sizeof(struct Segment), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (comm->segment == MAP_FAILED) abort();
    if (atomic_fetch_add(&comm->segment->joined, 1) + 1 == comm->size) unlink(path);
    while (atomic_load(&comm->segment->joined) < comm->size)
        if (pause_or_stop(comm, &spins)) {
            unlink(path);
            return 1;
        }
    return 0;
}

static int same_call(struct Comm *comm, const struct Header *is) {
    struct Segment *s = comm->segment;
    int same = 1;
    s->header[comm->rank] = *is;
    if (meet(comm)) return 0;
    for (int r = 0; r < comm->size; r++) same &= !memcmp(&s->header[r], &s->header[0], sizeof *is);
    if (!same) atomic_store(&comm->state, wrong(INTERNAL_ERROR, "ranks made different calls"));
    return !meet(comm) && same;
}

/* Operations ------------------------------------------------------------------------------------------------------ */

static size_t least(size_t a, size_t b) { return a < b ? a : b; }

static int collective(struct Comm *comm, struct Op *op) {
    struct Segment *s = comm->segment;
    struct Header *is = &op->is;
    int rank = comm->rank, root = is->root, reduces = is->what != BROADCAST && is->what != ALL_GATHER;
    size_t step = width[is->dtype], values = CHUNK / step;
    size_t total = is->what == REDUCE_SCATTER ? is->count * (size_t)comm->size : is->count;
    uint8_t result[CHUNK];
    if (!same_call(comm, is)) return 1;
    for (size_t at = 0; at < total; at += values) {
        size_t n = least(values, total - at);
        if (is->what != BROADCAST || rank == root) memcpy(s->slot[rank], op->send + at * step, n * step);
        if (meet(comm)) return 1;
        if (reduces && (is->what != REDUCE || rank == root)) reduce_slots(comm, op, result, n);
        if (is->what == ALL_REDUCE || (is->what == REDUCE && rank == root))
            memcpy(op->recv + at * step, result, n * step);
        if (is->what == BROADCAST) memcpy(op->recv + at * step, s->slot[root], n * step);
        if (is->what == ALL_GATHER)
            for (int r = 0; r < comm->size; r++)
                memcpy(op->recv + ((size_t)r * is->count + at) * step, s->slot[r], n * step);
        if (is->what == REDUCE_SCATTER)
            for (size_t k = 0; k < n; k++)
                if ((at + k) / is->count == (size_t)rank)
                    memcpy(op->recv + (at + k - (size_t)rank * is->count) * step, result + k * step, step);
        if (meet(comm)) return 1;
    }
    return 0;
}

static int advance(struct Comm *comm, struct Op *op) { /* one message of a send or recv, if it can be */
    int sends = op->is.what == SEND;
    size_t left = op->is.count * width[op->is.dtype] - op->done;
    int from = sends ? comm->rank : op->is.root, to = sends ? op->is.root : comm->rank;
    struct Mail *mail = &comm->segment->mail[from][to];
    if (atomic_load(&mail->full) == (uint32_t)sends) return 0;
    if (sends) {
        mail->bytes = (uint32_t)least(left, CHUNK);
        memcpy(mail->data, op->send + op->done, mail->bytes);
    } else {
        memcpy(op->recv + op->done, mail->data, least(left, mail->bytes));
    }
    op->done += mail->bytes;
    atomic_store(&mail->full, (uint32_t)sends);
    return 1;
}

static int messages(struct Comm *comm, struct Task *task) {
    int left = 1, spins = 0;
    while (left) {
        int moved = left = 0;
        for (int k = 0; k < task->count; k++) {
            struct Op *op = &task->ops[k];
            if (op->is.what < SEND || op->done >= op->is.count * width[op->is.dtype]) continue;
            left = 1;
            int earlier = 0; /* messages to one peer keep their order */
            for (int e = 0; e < k; e++)
                earlier |= task->ops[e].is.what == op->is.what && task->ops[e].is.root == op->is.root &&
                           task->ops[e].done < task->ops[e].is.count * width[task->ops[e].is.dtype];
            if (!earlier) moved |= advance(comm, op);
        }
        if (moved) spins = 0;
        else if (left && pause_or_stop(comm, &spins)) return 1;
    }
    return 0;
}

static int told_to_break(struct Comm *comm) {
    const char *wish = getenv("NCCL_STUB_ASYNC");
    int number, code, spins = 100;
    if (!wish) return 0;
    if (sscanf(wish, "%d:%d", &number, &code) != 2) abort();
    if (++comm->operations != number) return 0;
    atomic_store(&comm->state, wrong(code, "the network fails as the stub was told"));
    while (!pause_or_stop(comm, &spins));
    return 1;
}

static void run_batch(struct Comm *comm, struct Task *task) {
    int broken = atomic_load(&comm->stop); /* others may still be at the operation before */
    for (int k = 0; k < task->count && !broken; k++) broken = told_to_break(comm);
    if (!getenv("NCCL_STUB_DRY")) {
        for (int k = 0; k < task->count && !broken; k++)
            if (task->ops[k].is.what < SEND) broken = collective(comm, &task->ops[k]);
        if (!broken) messages(comm, task);
    }
    /* Also those that an abort has ended. */
    for (int k = 0; k < task->count; k++) atomic_fetch_add(&streams[task->ops[k].stream].completed, 1);
}

/* Calls ----------------------------------------------------------------------------------------------------------- */

static void run_join(struct Comm *comm, struct Task *task) {
    (void)task;
    join_ranks(comm);
    atomic_fetch_sub(&comm->waiting, 1);
}

static void *work(void *argument) {
    struct Comm *comm = argument;
    for (;;) {
        pthread_mutex_lock(&comm->lock);
        while (!comm->head && !comm->closing && !atomic_load(&comm->stop))
            pthread_cond_wait(&comm->changed, &comm->lock);
        struct Task *task = comm->head;
        if (task && !(comm->head = task->next)) comm->tail = NULL;
        pthread_mutex_unlock(&comm->lock);
        if (!task) return NULL;
        task->run(comm, task);
        free(task);
    }
}

static void submit(struct Comm *comm, struct Task *task) {
    for (int k = 0; k < task->count; k++) atomic_fetch_add(&streams[task->ops[k].stream].submitted, 1);
    pthread_mutex_lock(&comm->lock);
    if (comm->tail) comm->tail->next = task;
    else comm->head = task;
    comm->tail = task;
    pthread_cond_signal(&comm->changed);
    pthread_mutex_unlock(&comm->lock);
}

static struct Task *new_task(void (*run)(struct Comm *, struct Task *), int count) {
    struct Task *task = calloc(1, sizeof *task + (size_t)count * sizeof(struct Op));
    if (!task) abort();
    task->run = run;
    task->count = count;
    return task;
}

static struct Comm *new_comm(const char *token, int rank, int size, int blocking) {
    struct Comm *comm = calloc(1, sizeof *comm);
    if (!comm) abort();
    comm->alive = ALIVE;
    comm->rank = rank;
    comm->size = size;
    comm->blocking = blocking;
    snprintf(comm->token, sizeof comm->token, "%s", token);
    pthread_mutex_init(&comm->lock, NULL);
    pthread_cond_init(&comm->changed, NULL);
    atomic_fetch_add(&live, 1);
    return comm;
}

static void check_alive(struct Comm *comm, const char *name) {
    if (comm && comm->alive == ALIVE) return;
    fprintf(stderr, "%s on a communicator that was freed, or never was\n", name);
    abort();
}

static void free_comm(struct Comm *comm) { /* its few bytes stay, so that a later use is found */
    if (comm->segment && comm->segment != MAP_FAILED) munmap(comm->segment, sizeof *comm->segment);
    comm->alive = 0;
    atomic_fetch_sub(&live, 1);
}

static int in_progress(struct Comm *comm) {
    return atomic_load(&comm->waiting) > 0 || now_ns() < atomic_load(&comm->busy_until);
}

/* Every call on a communicator begins with `enter`; with `leave` it ends, unless `enter` has returned an error. */
static int enter(struct Comm *comm, const char *name) {
    int code = OK, spins = 100;
    check_alive(comm, name);
    if (atomic_fetch_add(&comm->inside, 1)) code = wrong(BAD_USAGE, "%s: concurrent calls on one communicator", name);
    else if (comm->finalized) code = wrong(BAD_USAGE, "%s after ncclCommFinalize", name);
    else if (atomic_load(&comm->state)) code = atomic_load(&comm->state);
    else if (in_progress(comm)) code = wrong(BAD_USAGE, "%s while an earlier call is in progress", name);
    else code = injected(name);
    if (!code && hangs(name)) {
        if (comm->blocking) {
            while (!pause_or_stop(comm, &spins));
            code = wrong(INTERNAL_ERROR, "%s was aborted", name);
        } else {
            atomic_fetch_add(&comm->waiting, 1);
        }
    }
    if (code) atomic_fetch_sub(&comm->inside, 1);
    return code;
}

static int leave(struct Comm *comm) {
    int code = OK, spins = 0;
    if (comm->blocking) {
        while (atomic_load(&comm->waiting) && !pause_or_stop(comm, &spins));
        code = atomic_load(&comm->stop) ? INTERNAL_ERROR : atomic_load(&comm->state);
    } else {
        atomic_store(&comm->busy_until, now_ns() + BUSY_NS);
        code = IN_PROGRESS;
    }
    atomic_fetch_sub(&comm->inside, 1);
    return code;
}

static int refuse(int code) {
    if (depth) group_error = code;
    return code;
}

static int operate(const char *name, struct Comm *comm, void *stream, struct Op op) {
    int spoiled = comm && comm->alive == ALIVE && op.is.op >= OPS &&
                  (op.is.op >= OPS + PREMULS || !comm->premul[op.is.op - OPS].used ||
                   comm->premul[op.is.op - OPS].dtype != op.is.dtype);
    int code = enter(comm, name);
    if (code) return refuse(code);
    if (op.is.dtype < 0 || op.is.dtype >= (SINCE(10) ? DTYPES : BF16)) code = wrong(BAD_ARGUMENT, "%s: dtype", name);
    else if (op.is.op < 0 || spoiled || (op.is.op == AVG && !SINCE(10))) code = wrong(BAD_ARGUMENT, "%s: op", name);
    else if (op.is.root < 0 || op.is.root >= comm->size) code = wrong(BAD_ARGUMENT, "%s: no such rank", name);
    else if (depth && grouped == GROUP) abort();
    if (code) {
        atomic_fetch_sub(&comm->inside, 1);
        return refuse(code);
    }
    atomic_store(&last_count, op.is.count);
    op.stream = stream_index(stream);
    if (op.is.op >= OPS) op.factor = comm->premul[op.is.op - OPS].factor;
    if (depth) {
        group[grouped].comm = comm;
        group[grouped++].op = op;
        atomic_fetch_sub(&comm->inside, 1);
        return OK;
    }
    struct Task *task = new_task(run_batch, 1);
    task->ops[0] = op;
    submit(comm, task);
    return leave(comm);
}

int ncclGetVersion(int *version) {
    *version = VERSION;
    return injected("ncclGetVersion");
}

int ncclGetUniqueId(UniqueId *id) {
    static atomic_int made;
    int code = injected("ncclGetUniqueId");
    memset(id, 0, sizeof *id);
    snprintf(id->internal, sizeof id->internal, "nccl-stub-%d-%llu-%d", (int)getpid(), (unsigned long long)now_ns(),
             atomic_fetch_add(&made, 1));
    return code;
}

const char *ncclGetErrorString(int code) { return code == 99 ? "an error of the future" : "an error"; }

#if SINCE(13)
const char *ncclGetLastError(struct Comm *comm) {
    (void)comm;
    return last_error;
}
#endif

static int init(const char *name, struct Comm **made, int size, UniqueId id, int rank, int blocking) {
    char token[64];
    int code = injected(name);
    if (code) return code;
    if (size < 1 || size > RANKS || rank < 0 || rank >= size) return wrong(BAD_ARGUMENT, "%s: no such rank", name);
    if (strncmp(id.internal, "nccl-stub-", 10)) return wrong(BAD_ARGUMENT, "%s: not an id of this library", name);
    snprintf(token, sizeof token, "%.60s", id.internal);
    struct Comm *comm = new_comm(token, rank, size, blocking);
    atomic_fetch_add(&comm->inside, 1);
    atomic_fetch_add(&comm->waiting, hangs(name) ? 2 : 1);
    submit(comm, new_task(run_join, 0));
    pthread_create(&comm->worker, NULL, work, comm);
    if (!blocking) *made = comm;
    code = leave(comm);
    if (blocking && !code) *made = comm;
    return code;
}

int ncclCommInitRank(struct Comm **made, int size, UniqueId id, int rank) {
    return init("ncclCommInitRank", made, size, id, rank, 1);
}

#if SINCE(14)
int ncclCommInitRankConfig(struct Comm **made, int size, UniqueId id, int rank, Config *config) {
    const char *name = "ncclCommInitRankConfig";
    const char *override = getenv("NCCL_COMM_BLOCKING");
    if (config && (config->magic != 0xcafebeef || config->size < 24 || config->version < 21400))
        return wrong(BAD_ARGUMENT, "%s: the configuration was not initialized", name);
    if (config && config->version >= 21700 && config->size >= 40 && config->max_ctas > 0)
        atomic_store(&most_ctas, config->max_ctas);
    return init(name, made, size, id, rank, override ? atoi(override) : !config || config->blocking);
}

static void run_finalize(struct Comm *comm, struct Task *task) {
    (void)task;
    if (!atomic_load(&comm->stop)) meet(comm);
    atomic_fetch_sub(&comm->waiting, 1);
}

int ncclCommFinalize(struct Comm *comm) {
    int code = enter(comm, "ncclCommFinalize");
    if (code) return code;
    comm->finalized = 1;
    atomic_fetch_add(&comm->waiting, 1);
    submit(comm, new_task(run_finalize, 0));
    return leave(comm);
}
#endif

int ncclCommDestroy(struct Comm *comm) {
    check_alive(comm, "ncclCommDestroy");
    while (hangs("ncclCommDestroy")) nap();
    pthread_mutex_lock(&comm->lock);
    comm->closing = 1;
    pthread_cond_signal(&comm->changed);
    pthread_mutex_unlock(&comm->lock);
    pthread_join(comm->worker, NULL);
    free_comm(comm);
    return injected("ncclCommDestroy");
}

int ncclCommAbort(struct Comm *comm) {
    check_alive(comm, "ncclCommAbort");
    while (hangs("ncclCommAbort")) nap();
    atomic_store(&comm->stop, 1);
    pthread_mutex_lock(&comm->lock);
    pthread_cond_signal(&comm->changed);
    pthread_mutex_unlock(&comm->lock);
    pthread_join(comm->worker, NULL);
    while (atomic_load(&comm->inside)) nap();
    free_comm(comm);
    return injected("ncclCommAbort");
}

int ncclCommGetAsyncError(struct Comm *comm, int *state) {
    check_alive(comm, "ncclCommGetAsyncError");
    int error = atomic_load(&comm->state);
    *state = error ? error : in_progress(comm) ? IN_PROGRESS : OK;
    return injected("ncclCommGetAsyncError");
}

int ncclCommCount(struct Comm *comm, int *count) {
    check_alive(comm, "ncclCommCount");
    *count = comm->size;
    return injected("ncclCommCount");
}

int ncclCommUserRank(struct Comm *comm, int *rank) {
    check_alive(comm, "ncclCommUserRank");
    *rank = comm->rank;
    return injected("ncclCommUserRank");
}

#if SINCE(18)
static void run_split(struct Comm *comm, struct Task *task) {
    struct Header is = {SPLIT, 0, 0, 0, 0};
    int stopped = atomic_load(&comm->stop), mine[2] = {task->color, task->key}, theirs[2], rank = 0, size = 0;
    char token[192];
    if (!stopped && same_call(comm, &is)) {
        memcpy(comm->segment->slot[comm->rank], mine, sizeof mine);
        if (!meet(comm)) {
            for (int r = 0; r < comm->size; r++) {
                memcpy(theirs, comm->segment->slot[r], sizeof theirs);
                if (theirs[0] != mine[0]) continue;
                size++;
                rank += theirs[1] < mine[1] || (theirs[1] == mine[1] && r < comm->rank);
            }
            snprintf(token, sizeof token, "%.100s.%d.%d", comm->token, comm->splits++, mine[0]);
            if (!meet(comm) && mine[0] >= 0) {
                struct Comm *child = new_comm(token, rank, size, comm->blocking);
                atomic_fetch_add(&child->waiting, 1);
                submit(child, new_task(run_join, 0));
                pthread_create(&child->worker, NULL, work, child);
                *task->made = child;
            }
        }
    }
    atomic_fetch_sub(&comm->waiting, 1);
}

int ncclCommSplit(struct Comm *comm, int color, int key, struct Comm **made, Config *config) {
    int code = enter(comm, "ncclCommSplit");
    if (code) return code;
    (void)config;
    *made = NULL;
    struct Task *task = new_task(run_split, 0);
    task->color = color;
    task->key = key;
    task->made = made;
    atomic_fetch_add(&comm->waiting, 1);
    submit(comm, task);
    return leave(comm);
}
#endif

#if SINCE(11)
int ncclRedOpCreatePreMulSum(int *op, void *scalar, int dtype, int residence, struct Comm *comm) {
    int code = enter(comm, "ncclRedOpCreatePreMulSum"), k = 0;
    if (code) return code;
    while (k < PREMULS && comm->premul[k].used) k++;
    if (k == PREMULS || residence != 1 || dtype < 0 || dtype >= DTYPES) {
        code = wrong(BAD_ARGUMENT, "ncclRedOpCreatePreMulSum: too many, or no such dtype or residence");
    } else {
        comm->premul[k].used = 1;
        comm->premul[k].dtype = dtype;
        comm->premul[k].factor = load(scalar, dtype);
        *op = OPS + k;
    }
    atomic_fetch_sub(&comm->inside, 1);
    return code;
}

int ncclRedOpDestroy(int op, struct Comm *comm) {
    int code = enter(comm, "ncclRedOpDestroy");
    if (code) return code;
    if (op < OPS || op >= OPS + PREMULS || !comm->premul[op - OPS].used)
        code = wrong(BAD_ARGUMENT, "ncclRedOpDestroy: no such op");
    else comm->premul[op - OPS].used = 0;
    atomic_fetch_sub(&comm->inside, 1);
    return code;
}
#endif

int ncclAllReduce(const void *send, void *recv, size_t count, int dtype, int op, struct Comm *comm, void *stream) {
    struct Op it = {{ALL_REDUCE, dtype, op, 0, count}, send, recv, 0, 0, {0, 0}};
    return operate("ncclAllReduce", comm, stream, it);
}

int ncclReduce(const void *send, void *recv, size_t count, int dtype, int op, int root, struct Comm *comm,
               void *stream) {
    struct Op it = {{REDUCE, dtype, op, root, count}, send, recv, 0, 0, {0, 0}};
    return operate("ncclReduce", comm, stream, it);
}

int ncclBroadcast(const void *send, void *recv, size_t count, int dtype, int root, struct Comm *comm, void *stream) {
    struct Op it = {{BROADCAST, dtype, 0, root, count}, send, recv, 0, 0, {0, 0}};
    return operate("ncclBroadcast", comm, stream, it);
}

int ncclAllGather(const void *send, void *recv, size_t count, int dtype, struct Comm *comm, void *stream) {
    struct Op it = {{ALL_GATHER, dtype, 0, 0, count}, send, recv, 0, 0, {0, 0}};
    return operate("ncclAllGather", comm, stream, it);
}

int ncclReduceScatter(const void *send, void *recv, size_t count, int dtype, int op, struct Comm *comm, void *stream) {
    struct Op it = {{REDUCE_SCATTER, dtype, op, 0, count}, send, recv, 0, 0, {0, 0}};
    return operate("ncclReduceScatter", comm, stream, it);
}

int ncclSend(const void *send, size_t count, int dtype, int peer, struct Comm *comm, void *stream) {
    struct Op it = {{SEND, dtype, 0, peer, count}, send, NULL, 0, 0, {0, 0}};
    return operate("ncclSend", comm, stream, it);
}

int ncclRecv(void *recv, size_t count, int dtype, int peer, struct Comm *comm, void *stream) {
    struct Op it = {{RECV, dtype, 0, peer, count}, NULL, recv, 0, 0, {0, 0}};
    return operate("ncclRecv", comm, stream, it);
}

int ncclGroupStart(void) {
    int code = injected("ncclGroupStart");
    if (!code) depth++;
    return code;
}

int ncclGroupEnd(void) {
    int code = injected("ncclGroupEnd"), result = OK;
    if (!depth) return wrong(BAD_USAGE, "ncclGroupEnd without ncclGroupStart");
    if (--depth) return code;
    if (!code) code = group_error;
    int total = grouped;
    group_error = grouped = 0;
    for (int k = 0; k < total && !code; k++) {
        struct Comm *comm = group[k].comm;
        int count = 0;
        if (!comm) continue;
        if ((code = enter(comm, "ncclGroupEnd"))) break;
        for (int e = k; e < total; e++) count += group[e].comm == comm;
        struct Task *task = new_task(run_batch, count);
        for (int e = k, n = 0; e < total; e++)
            if (group[e].comm == comm) {
                task->ops[n++] = group[e].op;
                group[e].comm = NULL;
            }
        submit(comm, task);
        if ((code = leave(comm)) == IN_PROGRESS) {
            result = IN_PROGRESS;
            code = OK;
        }
    }
    return code ? code : result;
}

/* Memory: ordinary, counted, and known by its address while it is registered. ---------------------------------------- */

static atomic_int memories, registrations;

#if SINCE(19)
int ncclMemAlloc(void **made, size_t bytes) {
    int code = injected("ncclMemAlloc");
    if (code) return code;
    if (posix_memalign(made, 4096, bytes)) return wrong(CUDA_ERROR, "ncclMemAlloc: out of memory");
    memset(*made, 0xa5, bytes);
    atomic_fetch_add(&memories, 1);
    return OK;
}

int ncclMemFree(void *memory) {
    free(memory);
    atomic_fetch_sub(&memories, 1);
    return injected("ncclMemFree");
}

int ncclCommRegister(struct Comm *comm, void *memory, size_t bytes, void **handle) {
    int code = enter(comm, "ncclCommRegister");
    if (code) return code;
    (void)bytes;
    *handle = memory;
    atomic_fetch_add(&registrations, 1);
    return leave(comm);
}

int ncclCommDeregister(struct Comm *comm, void *handle) {
    int code = enter(comm, "ncclCommDeregister");
    if (code) return code;
    (void)handle;
    atomic_fetch_sub(&registrations, 1);
    return leave(comm);
}
#endif

#if SINCE(27)
static void run_window(struct Comm *comm, struct Task *task) { /* color: what is called; count is in key */
    struct Header is = {task->color, 0, 0, 0, (uint64_t)task->key};
    if (!atomic_load(&comm->stop)) same_call(comm, &is);
    atomic_fetch_sub(&comm->waiting, 1);
}

static int window(struct Comm *comm, int what, size_t bytes) {
    struct Task *task = new_task(run_window, 0);
    task->color = what;
    task->key = (int)(bytes & 0x7fffffff);
    atomic_fetch_add(&comm->waiting, 1);
    submit(comm, task);
    return leave(comm);
}

int ncclCommWindowRegister(struct Comm *comm, void *memory, size_t bytes, void **made, int flags) {
    int code = enter(comm, "ncclCommWindowRegister");
    if (code) return code;
    if ((uintptr_t)memory % 4096 || bytes % 4096 || flags != 1) {
        atomic_fetch_sub(&comm->inside, 1);
        return wrong(BAD_ARGUMENT, "ncclCommWindowRegister: alignment or flags");
    }
    *made = memory;
    atomic_fetch_add(&registrations, 1);
    return window(comm, WINDOW, bytes);
}

int ncclCommWindowDeregister(struct Comm *comm, void *made) {
    int code = enter(comm, "ncclCommWindowDeregister");
    if (code) return code;
    (void)made;
    atomic_fetch_sub(&registrations, 1);
    return window(comm, NO_WINDOW, 0);
}
#endif

/* What we do not call; pynccl and CuPy look for it when they load the library. */
int ncclBcast(void *buffer, size_t count, int dtype, int root, struct Comm *comm, void *stream) {
    return ncclBroadcast(buffer, buffer, count, dtype, root, comm, stream);
}

int ncclCommInitAll(struct Comm **made, int count, const int *devices) {
    (void)made, (void)count, (void)devices;
    return wrong(BAD_USAGE, "ncclCommInitAll: the stub has one rank a process");
}

int ncclCommCuDevice(struct Comm *comm, int *device) {
    check_alive(comm, "ncclCommCuDevice");
    *device = 0;
    return OK;
}

/* What tests use beside NCCL -------------------------------------------------------------------------------------- */

int stubMostCtas(void) { return atomic_load(&most_ctas); }

int stubMemories(void) { return atomic_load(&memories); }

int stubRegistrations(void) { return atomic_load(&registrations); }

/* An event: what was enqueued on the stream until now. */
uint64_t stubEventRecord(void *stream) {
    int k = stream_index(stream);
    return (uint64_t)k << 48 | atomic_load(&streams[k].submitted);
}

int stubEventDone(uint64_t event) {
    return atomic_load(&streams[event >> 48].completed) >= (event & 0xffffffffffffu);
}

uint64_t stubLastCount(void) { return atomic_load(&last_count); } /* of the last operation, in values */

int stubLive(void) { return atomic_load(&live); } /* communicators that were neither destroyed nor aborted */
