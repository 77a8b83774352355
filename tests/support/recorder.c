/* Preloaded into a process: append each change of a file below $RECORD_UNDER to the file $RECORD_TO.

   A record is a kind, the length of the path, an offset, the length of the data; path; data. Kinds:
   W write, T truncate, U unlink, R rename, N mkdir, S synced; C and D are the beginning of a file that is
   mapped into memory ($RECORD_MAPPED): as it is in the cache, and as it was synced. A write is
   recorded before it is done, and a sync afterwards, so a record never claims too much. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

struct __attribute__((packed)) head { char kind; uint32_t path; uint64_t at; uint64_t size; };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int to = -1;
static const char *under, *mapped;

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("RECORD_TO");
    under = getenv("RECORD_UNDER");
    mapped = getenv("RECORD_MAPPED");
    /* A process may write over its environment, to change its title. */
    if (under) under = strdup(under);
    if (mapped) mapped = strdup(mapped);
    if (path && under) to = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
}

static void note(char kind, const char *path, uint64_t at, const void *data, uint64_t size) {
    if (to < 0 || strncmp(path, under, strlen(under))) return;
    struct head head = {kind, (uint32_t)strlen(path), at, size};
    struct iovec parts[3] = {{&head, sizeof head}, {(void *)path, head.path}, {(void *)data, size}};
    pthread_mutex_lock(&lock);
    if (writev(to, parts, 3) != (ssize_t)(sizeof head + head.path + size)) abort();
    pthread_mutex_unlock(&lock);
}

static int path_of(int file, char *path) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t size = readlink(link, path, PATH_MAX - 1);
    if (size < 0) return 0;
    path[size] = 0;
    return to >= 0 && file != to && !strncmp(path, under, strlen(under));
}

static void note_mapped(char kind) {
    static ssize_t (*real)(int, void *, size_t, off_t);
    if (!real) real = dlsym(RTLD_NEXT, "pread");
    char data[4096];
    int file = mapped ? open(mapped, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0) return;
    ssize_t size = real(file, data, sizeof data, 0);
    if (size > 0) note(kind, mapped, 0, data, (uint64_t)size);
    close(file);
}

#define REAL(type, name, ...) static type (*real)(__VA_ARGS__); if (!real) real = dlsym(RTLD_NEXT, name)

#define PWRITE(name, offset) \
    ssize_t name(int file, const void *data, size_t size, offset at) { \
        REAL(ssize_t, #name, int, const void *, size_t, offset); \
        char path[PATH_MAX]; \
        if (path_of(file, path)) note('W', path, (uint64_t)at, data, size); \
        return real(file, data, size, at); \
    }
PWRITE(pwrite, off_t)
PWRITE(pwrite64, off64_t)

static uint64_t offset_of(int file) {
    struct stat found;
    if (fcntl(file, F_GETFL) & O_APPEND && !fstat(file, &found)) return (uint64_t)found.st_size;
    return (uint64_t)lseek(file, 0, SEEK_CUR);
}

ssize_t write(int file, const void *data, size_t size) {
    REAL(ssize_t, "write", int, const void *, size_t);
    char path[PATH_MAX];
    if (path_of(file, path)) note('W', path, offset_of(file), data, size);
    return real(file, data, size);
}

static void note_parts(int file, const struct iovec *parts, int count, uint64_t at) {
    char path[PATH_MAX];
    if (!path_of(file, path)) return;
    for (int each = 0; each < count; at += parts[each++].iov_len)
        note('W', path, at, parts[each].iov_base, parts[each].iov_len);
}

#define PWRITEV(name, offset) \
    ssize_t name(int file, const struct iovec *parts, int count, offset at) { \
        REAL(ssize_t, #name, int, const struct iovec *, int, offset); \
        note_parts(file, parts, count, (uint64_t)at); \
        return real(file, parts, count, at); \
    }
PWRITEV(pwritev, off_t)
PWRITEV(pwritev64, off64_t)

#define OPEN(name) \
    int name(const char *path, int flags, ...) { \
        REAL(int, #name, const char *, int, ...); \
        va_list more; \
        va_start(more, flags); \
        mode_t mode = flags & (O_CREAT | __O_TMPFILE) ? va_arg(more, mode_t) : 0; \
        va_end(more); \
        int is_new = flags & O_CREAT && to >= 0 && access(path, F_OK); \
        int file = real(path, flags, mode), before = errno; \
        char found[PATH_MAX]; \
        if (file >= 0 && (is_new || flags & O_TRUNC) && path_of(file, found)) \
            note(is_new ? 'W' : 'T', found, 0, "", 0); \
        errno = before; \
        return file; \
    }
OPEN(open)
OPEN(open64)

#define ALLOCATE(name, offset) \
    int name(int file, offset at, offset size) { \
        REAL(int, #name, int, offset, offset); \
        char path[PATH_MAX]; \
        struct stat found; \
        if (path_of(file, path) && !fstat(file, &found) && found.st_size < at + size) \
            note('T', path, (uint64_t)(at + size), "", 0); \
        return real(file, at, size); \
    }
ALLOCATE(posix_fallocate, off_t)
ALLOCATE(posix_fallocate64, off64_t)

/* A process may name a file from its working directory. */
static const char *whole(const char *path, char *made) {
    if (*path == '/' || to < 0 || !getcwd(made, PATH_MAX)) return path;
    size_t size = strlen(made);
    snprintf(made + size, PATH_MAX - size, "/%s", path);
    return made;
}

int rename(const char *from, const char *path) {
    REAL(int, "rename", const char *, const char *);
    char old[PATH_MAX], new[PATH_MAX];
    int done = real(from, path);
    if (!done) { const char *target = whole(path, new); note('R', whole(from, old), 0, target, strlen(target)); }
    return done;
}

#define TRUNCATE(name, offset) \
    int name(int file, offset size) { \
        REAL(int, #name, int, offset); \
        char path[PATH_MAX]; \
        if (path_of(file, path)) note('T', path, (uint64_t)size, "", 0); \
        return real(file, size); \
    }
TRUNCATE(ftruncate, off_t)
TRUNCATE(ftruncate64, off64_t)

#define SYNC(name) \
    int name(int file) { \
        REAL(int, #name, int); \
        char path[PATH_MAX]; \
        int done = real(file); \
        if (!done && path_of(file, path)) { note_mapped('C'); note('S', path, 0, "", 0); } \
        return done; \
    }
SYNC(fsync)
SYNC(fdatasync)

/* Files that are written through memory, but for $RECORD_MAPPED. A sync of memory is recorded as writes of
   the pages that differ from the last time, as they were before it, and a sync of the file. */
enum { MAPS = 256, PAGE = 4096 };
static struct map { char *at, *seen, *path; size_t size; uint64_t offset; } maps[MAPS];
static pthread_mutex_t maps_lock = PTHREAD_MUTEX_INITIALIZER;

static void keep_map(void *at, size_t size, int file, uint64_t offset) {
    char path[PATH_MAX];
    struct stat found;
    if (!path_of(file, path) || (mapped && !strcmp(path, mapped)) || fstat(file, &found)) return;
    char *seen = calloc(1, size);
    if (!seen) abort();
    if ((uint64_t)found.st_size > offset) {
        uint64_t there = (uint64_t)found.st_size - offset;
        memcpy(seen, at, there < size ? there : size);
    }
    pthread_mutex_lock(&maps_lock);
    int each = 0;
    while (each < MAPS && maps[each].at) each++;
    if (each == MAPS) abort();
    maps[each] = (struct map){at, seen, strdup(path), size, offset};
    pthread_mutex_unlock(&maps_lock);
}

#define MMAP(name, offset) \
    void *name(void *at, size_t size, int protection, int flags, int file, offset from) { \
        REAL(void *, #name, void *, size_t, int, int, int, offset); \
        void *made = real(at, size, protection, flags, file, from); \
        int is_shared = (flags & MAP_TYPE) != MAP_PRIVATE && protection & PROT_WRITE; \
        if (made != MAP_FAILED && file >= 0 && is_shared) keep_map(made, size, file, (uint64_t)from); \
        return made; \
    }
MMAP(mmap, off_t)
MMAP(mmap64, off64_t)

int munmap(void *at, size_t size) {
    REAL(int, "munmap", void *, size_t);
    pthread_mutex_lock(&maps_lock);
    for (struct map *each = maps; each < maps + MAPS; each++)
        if (each->at == at) {
            free(each->seen);
            free(each->path);
            *each = (struct map){0};
        }
    pthread_mutex_unlock(&maps_lock);
    return real(at, size);
}

static void note_pages(struct map *map, size_t from, size_t size) {
    for (size_t at = from / PAGE * PAGE; at < map->size && at < from + size; at += PAGE) {
        size_t part = map->size - at < PAGE ? map->size - at : PAGE;
        if (!memcmp(map->seen + at, map->at + at, part)) continue;
        memcpy(map->seen + at, map->at + at, part);
        note('W', map->path, map->offset + at, map->seen + at, part);
    }
}

int msync(void *at, size_t size, int flags) {
    REAL(int, "msync", void *, size_t, int);
    char path[PATH_MAX] = "";
    pthread_mutex_lock(&maps_lock);
    for (struct map *each = maps; each < maps + MAPS; each++)
        if (each->at && (char *)at >= each->at && (char *)at < each->at + each->size) {
            note_pages(each, (size_t)((char *)at - each->at), size);
            strcpy(path, each->path);
        }
    pthread_mutex_unlock(&maps_lock);
    int done = real(at, size, flags);
    if (!done && *path) note('S', path, 0, "", 0);
    if (!done) note_mapped('D');
    return done;
}

int unlink(const char *path) {
    REAL(int, "unlink", const char *);
    char made[PATH_MAX];
    note('U', whole(path, made), 0, "", 0);
    return real(path);
}

int mkdir(const char *path, mode_t mode) {
    REAL(int, "mkdir", const char *, mode_t);
    char made[PATH_MAX];
    int done = real(path, mode);
    if (!done) note('N', whole(path, made), 0, "", 0);
    return done;
}
