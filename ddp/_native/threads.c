/* Runs the loops of "omp parallel for" on the threads of NumPy's OpenBLAS, so that products and kernels share one pool.
 *
 * A part of kernels.c. For these loops GCC calls the last three functions of this file, in place of those of libgomp. libgomp
 * would bring a second pool: its threads would compete with OpenBLAS's for the same cores, and it hangs in a forked child.
 */
#define MAX_THREADS 64
#define SHARE (1 << 14) /* minimum of numbers per thread: with fewer, waking the thread takes longer than it saves */
#define HIDDEN __attribute__((visibility("hidden"))) /* so that our calls do not go to a libgomp that another library loads */

/* OpenBLAS's gotoblas_pthread: runs a function on `count` threads, this thread included, each with its own argument */
typedef int (*pool_runner)(int count, void *function, void *arguments, int argument_size);

typedef struct {
    void (*body)(void *);
    void *data;
    int thread_num, num_threads;
} task;

static pool_runner run_on_pool;
static int (*pool_size)(void);
static __thread int thread_num, num_threads = 1;

void set_thread_pool(pool_runner run, int (*size)(void))
{
    run_on_pool = run;
    pool_size = size;
}

/* The number of threads for a loop that works on `work` numbers: it grows with `work`. */
int count_threads(size work)
{
    const size most = run_on_pool && work >= 2 * SHARE ? least(least(pool_size(), MAX_THREADS), work / SHARE) : 1;
    return most < 1 ? 1 : (int)most;
}

static void run_task(task *own)
{
    thread_num = own->thread_num;
    num_threads = own->num_threads;
    own->body(own->data);
    thread_num = 0;
    num_threads = 1;
}

HIDDEN int omp_get_thread_num(void) { return thread_num; }
HIDDEN int omp_get_num_threads(void) { return num_threads; }

/* Calls `body` on `count` threads: the argument of num_threads in the pragma. */
HIDDEN void GOMP_parallel(void (*body)(void *), void *data, unsigned count, unsigned flags)
{
    task tasks[MAX_THREADS];
    for (unsigned i = 0; i < count; i++)
        tasks[i] = (task){body, data, (int)i, (int)count};
    if (count > 1)
        run_on_pool((int)count, (void *)run_task, tasks, sizeof(task));
    else
        body(data);
}
