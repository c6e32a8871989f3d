/* Preloaded into every program of a run: its wall clock is off by what the file in WALL_CLOCK holds (seconds, int64),
 * from one call to the next. Other clocks are left alone, and so is every way to wait. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <semaphore.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static int64_t offset(void) {
    static const volatile int64_t *found;
    static const int64_t none;
    if (found == NULL) {
        const char *path = getenv("WALL_CLOCK");
        int file = path == NULL ? -1 : open(path, O_RDONLY | O_CLOEXEC);
        void *map = file < 0 ? MAP_FAILED : mmap(NULL, sizeof none, PROT_READ, MAP_SHARED, file, 0);
        if (file >= 0) close(file);
        found = map == MAP_FAILED ? &none : map;
    }
    return *found;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int failed = syscall(SYS_clock_gettime, clock, now);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += offset();
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec exact;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &exact);
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *where) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    if (where != NULL) *where = exact.tv_sec;
    return exact.tv_sec;
}

/* The kernel compares with the true time. */
int sem_timedwait(sem_t *restrict semaphore, const struct timespec *restrict until) {
    struct timespec real = {until->tv_sec - offset(), until->tv_nsec};
    return sem_clockwait(semaphore, CLOCK_REALTIME, &real);
}
