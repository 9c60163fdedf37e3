/* Preloaded into a test's child process: makes libc's file calls fail as broken file systems do.
 *
 * Only calls on paths that contain `part` are touched. The child arms it through ctypes
 * (tests/faults.py); it stands below Python's os module and below HDF5 alike. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { FAIL = 0, LOST_REPLY = 1, SHORT = 2, KILL = 3 };
enum { MAX_FD = 4096 };

static char part[256], wanted[16];
static long countdown = -1, seen;
static int mode, error_number, hide_errno;
static double hidden_until, clock_step_s;
static char hidden_part[256];
static char of_interest[MAX_FD];

#define REAL(name) ((typeof(&name))dlsym(RTLD_NEXT, #name))

static double now(void) {
    struct timespec t;
    REAL(clock_gettime)(CLOCK_MONOTONIC, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}

/* The nth call of `op` ("any": all that change something) on a path with `where` in it. */
void fault_arm(const char *op, const char *where, long nth, int how, int number) {
    snprintf(wanted, sizeof wanted, "%s", op);
    snprintf(part, sizeof part, "%s", where);
    seen = 0, mode = how, error_number = number, countdown = nth;
}
long fault_seen(void) { return seen; }
/* Names with `where` in them do not exist for this many seconds, and listings do not show them. */
void fault_hide(const char *where, double seconds, int number) {
    snprintf(hidden_part, sizeof hidden_part, "%s", where);
    hide_errno = number, hidden_until = now() + seconds;
}
void fault_step_clock(double seconds) { clock_step_s = seconds; }

static int is_hidden(const char *name) {
    return hidden_part[0] && strstr(name, hidden_part) && now() < hidden_until;
}

/* Whether this call is the one: 0 no, 1 fail without doing it, 2 do it, then fail. */
static int hit(const char *op, int concerned, int changes) {
    if (!concerned || countdown < 0) return 0;
    if (strcmp(wanted, op) && !(changes && !strcmp(wanted, "any"))) return 0;
    seen++;
    if (countdown == 0 || --countdown > 0) return 0;
    if (mode == KILL) kill(getpid(), SIGKILL);
    errno = error_number;
    return mode == LOST_REPLY ? 2 : 1;
}
static int on_path(const char *path) { return part[0] && strstr(path, part) != NULL; }
static int on_fd(int fd) { return fd >= 0 && fd < MAX_FD && of_interest[fd]; }

#define FAILABLE(op, concerned, call)                       \
    int what = hit(op, concerned, 1);                       \
    if (what == 1) return -1;                               \
    int result = call;                                      \
    if (what == 2 && result == 0) {                         \
        errno = error_number;                               \
        return -1;                                          \
    }                                                       \
    return result;

static int opened(const char *path, int flags, int mode_bits, int (*real)(const char *, int, ...)) {
    if (is_hidden(path)) {
        errno = hide_errno;
        return -1;
    }
    if (hit("open", on_path(path), flags & O_CREAT)) return -1;
    int fd = real(path, flags, mode_bits);
    if (fd >= 0 && fd < MAX_FD) of_interest[fd] = on_path(path);
    return fd;
}
int open(const char *path, int flags, ...) {
    va_list rest;
    va_start(rest, flags);
    int bits = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, int) : 0;
    va_end(rest);
    return opened(path, flags, bits, REAL(open));
}
int open64(const char *path, int flags, ...) {
    va_list rest;
    va_start(rest, flags);
    int bits = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, int) : 0;
    va_end(rest);
    return opened(path, flags, bits, REAL(open64));
}
ssize_t write(int fd, const void *data, size_t n) {
    if (hit("write", on_fd(fd), 1)) {
        if (mode != SHORT) return -1;
        n = n > 1 ? n / 2 : n;
    }
    return REAL(write)(fd, data, n);
}
ssize_t read(int fd, void *data, size_t n) {
    if (hit("read", on_fd(fd), 0)) {
        if (mode != SHORT) return -1;
        n = n > 1 ? n / 2 : n;
    }
    return REAL(read)(fd, data, n);
}
ssize_t pread64(int fd, void *data, size_t n, off64_t at) {
    return hit("read", on_fd(fd), 0) ? -1 : REAL(pread64)(fd, data, n, at);
}
ssize_t pread(int fd, void *data, size_t n, off_t at) {
    return hit("read", on_fd(fd), 0) ? -1 : REAL(pread)(fd, data, n, at);
}
int fsync(int fd) { FAILABLE("fsync", on_fd(fd), REAL(fsync)(fd)) }
int close(int fd) {
    int concerned = on_fd(fd);
    int what = hit("close", concerned, 1);
    int result = REAL(close)(fd); /* even a failing close() frees the descriptor */
    if (concerned) of_interest[fd] = 0;
    if (what) errno = error_number;
    return what ? -1 : result;
}
int rename(const char *a, const char *b) { FAILABLE("rename", on_path(b), REAL(rename)(a, b)) }
int link(const char *a, const char *b) { FAILABLE("link", on_path(b), REAL(link)(a, b)) }
int unlink(const char *path) { FAILABLE("unlink", on_path(path), REAL(unlink)(path)) }
int mkdir(const char *path, mode_t bits) {
    FAILABLE("mkdir", on_path(path), REAL(mkdir)(path, bits))
}
int stat64(const char *path, struct stat64 *found) {
    if (is_hidden(path)) {
        errno = hide_errno;
        return -1;
    }
    return REAL(stat64)(path, found);
}
int stat(const char *path, struct stat *found) {
    if (is_hidden(path)) {
        errno = hide_errno;
        return -1;
    }
    return REAL(stat)(path, found);
}
struct dirent64 *readdir64(DIR *directory) {
    struct dirent64 *entry;
    do entry = REAL(readdir64)(directory);
    while (entry && is_hidden(entry->d_name));
    return entry;
}
struct dirent *readdir(DIR *directory) {
    struct dirent *entry;
    do entry = REAL(readdir)(directory);
    while (entry && is_hidden(entry->d_name));
    return entry;
}
int clock_gettime(clockid_t which, struct timespec *t) {
    int result = REAL(clock_gettime)(which, t);
    if (which == CLOCK_REALTIME) t->tv_sec += (time_t)clock_step_s;
    return result;
}
