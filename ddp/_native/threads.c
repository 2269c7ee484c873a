/* What GCC makes of "omp parallel for" in kernels.c, of which this is a part: calls of the last three functions here.
 *
 * They run the loop on the threads of NumPy's OpenBLAS, so that products and kernels have one pool. libgomp would bring a
 * second, whose threads compete with OpenBLAS's for the same cores, and which hangs in a forked child.
 */
#define MAX_THREADS 64
#define HIDDEN __attribute__((visibility("hidden"))) /* a libgomp that another library loads takes no calls of ours */

/* OpenBLAS's gotoblas_pthread: runs a function on `count` threads, this one among them, each with its own argument */
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

/* How many threads run a loop from now on. */
int count_threads(void)
{
    const int count = run_on_pool ? pool_size() : 1;
    return count < 1 ? 1 : count < MAX_THREADS ? count : MAX_THREADS;
}

static void run_task(task *own)
{
    thread_num = own->thread_num;
    num_threads = own->num_threads;
    own->body(own->data);
    thread_num = 0;
    num_threads = 1;
}

HIDDEN int omp_get_thread_num(void)
{
    return thread_num;
}

HIDDEN int omp_get_num_threads(void)
{
    return num_threads;
}

/* most: 1 where the condition of the pragma is false; else what it says in num_threads, or 0 */
HIDDEN void GOMP_parallel(void (*body)(void *), void *data, unsigned most, unsigned flags)
{
    const int all = most == 1 ? 1 : count_threads(), count = most && (int)most < all ? (int)most : all;
    (void)flags;
    if (count == 1) {
        body(data);
        return;
    }
    task tasks[MAX_THREADS];
    for (int i = 0; i < count; i++)
        tasks[i] = (task){body, data, i, count};
    run_on_pool(count, (void *)run_task, tasks, sizeof(task));
}
