/* Holds packets for the latency of a cable: the kernel's own delay queue (netem) is not everywhere.
 *
 * Arguments, for each cable: NETNS DEVICE NETNS DEVICE NS_FORWARD NS_BACKWARD. Both devices are TUN devices that exist.
 * What is read from one is written to the other after the latency, in order. Says "ready" once all devices are open and
 * ends when its standard input closes, so that it never outlives the lab. relay.py does the same where there is no
 * compiler. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <poll.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#define BATCH 64
#define LARGEST 65536

struct packet {
    struct packet *next;
    uint64_t due;
    size_t size;
    unsigned char data[];
};

struct direction {
    int from, to;
    uint64_t delay;
    struct packet *head, **tail;
};

static uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000ull + (uint64_t)t.tv_nsec;
}

static void fail(const char *what, const char *which) {
    fprintf(stderr, "relay: %s %s: %s\n", what, which, strerror(errno));
    exit(1);
}

static int open_tun(const char *netns, const char *device) {
    char path[4096];
    struct ifreq request;
    int space, tun;

    snprintf(path, sizeof path, "/run/netns/%s", netns);
    if ((space = open(path, O_RDONLY | O_CLOEXEC)) < 0) fail("open", path);
    if (setns(space, CLONE_NEWNET) < 0) fail("enter", path);
    close(space);
    if ((tun = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC)) < 0) fail("open", "/dev/net/tun");
    memset(&request, 0, sizeof request);
    request.ifr_flags = IFF_TUN | IFF_NO_PI;
    strncpy(request.ifr_name, device, IFNAMSIZ - 1);
    if (ioctl(tun, TUNSETIFF, &request) < 0) fail("attach to", device);
    return tun;
}

static void deliver(struct direction *d, uint64_t now) {
    while (d->head && d->head->due <= now) {
        struct packet *p = d->head;
        if (write(d->to, p->data, p->size) < 0 && (errno == EAGAIN || errno == EINTR)) return;
        if (!(d->head = p->next)) d->tail = &d->head;
        free(p);
    }
}

static void collect(struct direction *d) {
    static unsigned char buffer[LARGEST];
    for (int i = 0; i < BATCH; i++) {
        ssize_t size = read(d->from, buffer, sizeof buffer);
        if (size <= 0) return;
        struct packet *p = malloc(sizeof *p + (size_t)size);
        if (!p) fail("memory for", "a packet");
        p->next = NULL;
        p->due = now_ns() + d->delay;
        p->size = (size_t)size;
        memcpy(p->data, buffer, (size_t)size);
        *d->tail = p;
        d->tail = &p->next;
    }
}

int main(int argc, char **argv) {
    int cables = (argc - 1) / 6, directions = 2 * cables;
    struct direction *all = calloc((size_t)directions + 1, sizeof *all);
    struct pollfd *polls = calloc((size_t)directions + 1, sizeof *polls);

    if (argc < 7 || (argc - 1) % 6 || !all || !polls) {
        fprintf(stderr, "usage: relay (NETNS DEVICE NETNS DEVICE NS_FORWARD NS_BACKWARD)...\n");
        return 2;
    }
    for (int i = 0; i < cables; i++) {
        char **a = argv + 1 + 6 * i;
        int first = open_tun(a[0], a[1]), second = open_tun(a[2], a[3]);
        all[2 * i] = (struct direction){first, second, strtoull(a[4], NULL, 10), NULL, NULL};
        all[2 * i + 1] = (struct direction){second, first, strtoull(a[5], NULL, 10), NULL, NULL};
    }
    for (int i = 0; i < directions; i++) {
        all[i].tail = &all[i].head;
        polls[i] = (struct pollfd){all[i].from, POLLIN, 0};
    }
    polls[directions] = (struct pollfd){0, POLLIN, 0};
    prctl(PR_SET_TIMERSLACK, 1ul, 0, 0, 0);
    puts("ready");
    fflush(stdout);
    for (;;) {
        uint64_t now = now_ns(), next = UINT64_MAX;
        for (int i = 0; i < directions; i++) {
            deliver(&all[i], now);
            if (all[i].head && all[i].head->due < next) next = all[i].head->due;
        }
        struct timespec wait = {0, 0}, *limit = NULL;
        if (next != UINT64_MAX) {
            now = now_ns();
            uint64_t left = next > now ? next - now : 0;
            wait.tv_sec = (time_t)(left / 1000000000ull);
            wait.tv_nsec = (long)(left % 1000000000ull);
            limit = &wait;
        }
        if (ppoll(polls, (nfds_t)directions + 1, limit, NULL) < 0) {
            if (errno == EINTR) continue;
            fail("wait for", "packets");
        }
        for (int i = 0; i < directions; i++)
            if (polls[i].revents & POLLIN) collect(&all[i]);
        if (polls[directions].revents) return 0;
    }
}
