/* The threads of kernels.c, of which this is a part: those of NumPy's OpenBLAS, one pool for products and kernels.
 *
 * GCC compiles "omp parallel for" into calls of the three functions below. OpenMP's own library would bring a second
 * pool, whose threads fight with OpenBLAS's over the same cores, and which hangs in a forked child.
 */
#include <stddef.h>

#define MOST 64 /* threads */
#define HIDDEN __attribute__((visibility("hidden"))) /* a libgomp that another library loads takes no calls of ours */

/* OpenBLAS's: runs a function on `count` threads, this one among them, and gives each its own of the arguments */
typedef int (*runner)(int count, void *function, void *arguments, int argument_size);

typedef struct {
    void (*body)(void *);
    void *data;
    int number, count;
} share;

static runner run_shares;
static int (*get_count)(void);
static __thread int my_number, my_count = 1;

void use_threads(runner run, int (*count)(void))
{
    run_shares = run;
    get_count = count;
}

/* How many threads share a loop from now on. */
int count_threads(void)
{
    const int count = run_shares ? get_count() : 1;
    return count < 1 ? 1 : count < MOST ? count : MOST;
}

HIDDEN int omp_get_thread_num(void)
{
    return my_number;
}

HIDDEN int omp_get_num_threads(void)
{
    return my_count;
}

static void run_share(share *mine)
{
    my_number = mine->number;
    my_count = mine->count;
    mine->body(mine->data);
    my_number = 0;
    my_count = 1;
}

/* threads: 1 where the loop's condition does not hold; else how many there may be, 0 for any number */
HIDDEN void GOMP_parallel(void (*body)(void *), void *data, unsigned threads, unsigned flags)
{
    const int all = threads == 1 ? 1 : count_threads(), count = threads && (int)threads < all ? (int)threads : all;
    (void)flags;
    if (count == 1) {
        body(data);
        return;
    }
    share shares[MOST];
    for (int i = 0; i < count; i++)
        shares[i] = (share){body, data, i, count};
    run_shares(count, (void *)run_share, shares, sizeof(share));
}
