/* Runs one quantizer written in C and hands back what it wrote, with a report of what it did to its arrays.

   argv: blocks, floats in a block, bytes in a block, seconds of processor time, bytes of memory, repeats.
   Standard input: the floats. Descriptor 1: a byte that says how it ended (`enum ending`), the seconds of the fastest
   repeat (a double), and the bytes. What the answer prints goes to descriptor 2.

   The arrays end where a page begins that nobody may touch, so the first byte too far is a signal, with its address;
   the floats cannot be written to; in front of both arrays, and where there is no mprotect behind them too, are bytes
   that must stay as they were. */

#define _GNU_SOURCE
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#if defined(__unix__) || defined(__APPLE__)
#define HAS_PAGES 1
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>
#ifndef MAP_ANONYMOUS
#define MAP_ANONYMOUS MAP_ANON
#endif
#else
#define HAS_PAGES 0
#include <fcntl.h>
#include <io.h>
#define dup _dup
#define dup2 _dup2
#define write _write
#endif

void FUNCTION(const float *x, uint8_t *out, size_t blocks);

/* Python's c_code.ENDINGS has the sentences. */
enum ending { DONE, PAST_INPUT, PAST_OUTPUT, WROTE_INPUT, BEFORE_INPUT, BEFORE_OUTPUT, BAD_ADDRESS, NO_MEMORY, BAD_INPUT };

enum { GUARD = 256, GUARD_BYTE = 0xA5, UNWRITTEN = 0xC3 };

typedef struct {
    uint8_t *start, *begin, *end, *stop; /* mapped from start to stop; the array from begin to end */
} Array;

static int results = 1;
static Array input, output;

static void finish(enum ending how, double seconds) {
    uint8_t first = (uint8_t)how;
    if (write(results, &first, 1) != 1 || write(results, &seconds, sizeof seconds) != (int)sizeof seconds)
        _Exit(1);
    if (how != DONE)
        _Exit(0);
}

static Array array_of(size_t bytes) {
    Array made;
#if HAS_PAGES
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    size_t room = (bytes + GUARD + page - 1) / page * page;
    made.start = mmap(NULL, room + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (made.start == MAP_FAILED || mprotect(made.start + room, page, PROT_NONE) != 0)
        finish(NO_MEMORY, 0);
    made.end = made.start + room;
    made.stop = made.end + page;
#else
    made.start = malloc(bytes + 2 * GUARD);
    if (made.start == NULL)
        finish(NO_MEMORY, 0);
    made.end = made.start + bytes + GUARD;
    made.stop = made.end + GUARD;
    memset(made.end, GUARD_BYTE, GUARD);
#endif
    made.begin = made.end - bytes;
    memset(made.start, GUARD_BYTE, (size_t)(made.begin - made.start));
    return made;
}

static int is_whole(const uint8_t *from, const uint8_t *to) {
    while (from < to)
        if (*from++ != GUARD_BYTE)
            return 0;
    return 1;
}

#if HAS_PAGES
static void on_signal(int number, siginfo_t *info, void *context) {
    (void)number, (void)context;
    const uint8_t *at = info->si_addr;
    if (at >= output.end && at < output.stop)
        finish(PAST_OUTPUT, 0);
    if (at >= input.end && at < input.stop)
        finish(PAST_INPUT, 0);
    if (at >= input.start && at < input.end)
        finish(WROTE_INPUT, 0);
    finish(BAD_ADDRESS, 0);
}

static void limit(int which, rlim_t most) {
    struct rlimit now;
    if (getrlimit(which, &now) == 0) {
        now.rlim_cur = now.rlim_max != RLIM_INFINITY && now.rlim_max < most ? now.rlim_max : most;
        setrlimit(which, &now);
    }
}

static void protect(rlim_t seconds, rlim_t memory) {
    static uint8_t stack[65536]; /* the handler's own: a stack that overflowed has no room for it */
    stack_t other = {.ss_sp = stack, .ss_size = sizeof stack};
    struct sigaction action = {.sa_sigaction = on_signal, .sa_flags = SA_SIGINFO | SA_ONSTACK};
    sigaltstack(&other, NULL);
    sigaction(SIGSEGV, &action, NULL);
    sigaction(SIGBUS, &action, NULL);
    limit(RLIMIT_CPU, seconds);
    limit(RLIMIT_CORE, 0);
    limit(RLIMIT_FSIZE, 0);
    if (memory > 0) /* a sanitizer reserves more than any machine has */
        limit(RLIMIT_AS, memory);
    mprotect(input.start, (size_t)(input.end - input.start), PROT_READ);
}
#endif

static double seconds_between(struct timespec from, struct timespec to) {
    return (double)(to.tv_sec - from.tv_sec) + 1e-9 * (double)(to.tv_nsec - from.tv_nsec);
}

int main(int argc, char **argv) {
    if (argc != 7)
        return 1;
    size_t blocks = strtoull(argv[1], NULL, 10), floats = strtoull(argv[2], NULL, 10);
    size_t bytes = strtoull(argv[3], NULL, 10), repeats = strtoull(argv[6], NULL, 10);
#if !HAS_PAGES
    _setmode(0, _O_BINARY);
    _setmode(1, _O_BINARY);
#endif
    results = dup(1);
    dup2(2, 1); /* what the answer prints */
    input = array_of(blocks * floats * sizeof(float));
    output = array_of(blocks * bytes);
    size_t wanted = (size_t)(input.end - input.begin);
    if (fread(input.begin, 1, wanted, stdin) != wanted)
        finish(BAD_INPUT, 0);
#if HAS_PAGES
    protect(strtoull(argv[4], NULL, 10), strtoull(argv[5], NULL, 10));
#endif
    double fastest = 1e30;
    for (size_t time = 0; time < repeats; time++) {
        memset(output.begin, UNWRITTEN, (size_t)(output.end - output.begin));
        struct timespec began, ended;
        timespec_get(&began, TIME_UTC);
        FUNCTION((const float *)input.begin, output.begin, blocks);
        timespec_get(&ended, TIME_UTC);
        double took = seconds_between(began, ended);
        fastest = took < fastest ? took : fastest;
    }
    fflush(stdout);
    if (!is_whole(input.start, input.begin))
        finish(BEFORE_INPUT, 0);
    if (!is_whole(output.start, output.begin))
        finish(BEFORE_OUTPUT, 0);
#if !HAS_PAGES
    if (!is_whole(input.end, input.stop))
        finish(PAST_INPUT, 0);
    if (!is_whole(output.end, output.stop))
        finish(PAST_OUTPUT, 0);
#endif
    finish(DONE, fastest);
    for (const uint8_t *at = output.begin; at < output.end;) {
        int wrote = (int)write(results, at, (unsigned)(output.end - at > 1 << 20 ? 1 << 20 : output.end - at));
        if (wrote <= 0)
            return 1;
        at += wrote;
    }
    return 0;
}
