/* Which state two cores are in: the best round trip of a flag between two processes, in nanoseconds.
 *
 * Both call it at the same time, one of them with `begins`: each writes a word of its own, which is 0 before, and reads the
 * other's. Infinity: they did not run at once for long enough before the limit.
 */
#define _GNU_SOURCE
#include <math.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <time.h>

enum { TRIPS = 64, ROUNDS = 200, SPINS = 1000 };

static double now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return 1e9 * t.tv_sec + t.tv_nsec;
}

double round_trip_ns(_Atomic int64_t *mine, _Atomic int64_t *other, int begins, double limit_ns) {
    double start = now_ns(), until = start + limit_ns, best = INFINITY;
    for (int64_t n = 1; n <= TRIPS * ROUNDS; n++) {
        if (begins) atomic_store_explicit(mine, n, memory_order_release);
        for (int i = 1; atomic_load_explicit(other, memory_order_acquire) < n; i++)
            if (i % SPINS == 0 && (sched_yield(), now_ns() > until)) return best;
        if (!begins) atomic_store_explicit(mine, n, memory_order_release);
        if (n % TRIPS) continue;
        double end = now_ns();
        if ((end - start) / TRIPS < best) best = (end - start) / TRIPS;
        start = end;
    }
    return best;
}
