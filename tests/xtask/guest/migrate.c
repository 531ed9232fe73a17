// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
/*
 * Moves processes, with all their threads, from one processor to another and back, and counts through which queues of a
 * network interface bytes came meanwhile:
 *
 *	migrate PID[,PID...] INTERFACE COUNT PERIOD_MS CPU...
 *
 * The first move is to the first CPU. Queue N is that of the N-th CPU of the list. At the end it prints
 *
 *	moves COUNT here BYTES elsewhere BYTES
 *
 * "here" came through the queue of the CPU that the processes were on. A process that ends before is an error.
 *
 *	migrate --follow PID[,PID...] INTERFACE COUNT MOST CPU...
 *
 * moves them as soon as what they receive has followed: of a window of frames nearly all came through the queue of their CPU, and
 * so have some windows more since. After MOST frames that did not it gives that move up. At the end it prints
 *
 *	moves COUNT followed COUNT slowest FRAMES here FRAMES elsewhere FRAMES
 *
 * where "slowest" is the most frames that came before any move was followed; "here" and "elsewhere" count those that came after
 * their move was.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <linux/genetlink.h>
#include <linux/netlink.h>
#include <net/if.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define MOST_CPUS 16
#define MOST_PROCESSES 16

/* Frames of a window, and those of them that must have followed: a timer or a frame of another flow may be among them. */
#define WINDOW 32
#define FOLLOWED 28
/* Windows of a stay after it was followed, and the pause between two looks. */
#define STAY_WINDOWS 8
#define LOOK_NS 1000000

/* The generic netlink family "netdev" (Documentation/netlink/specs/netdev.yaml), newer than many machines' headers. */
#define QSTATS_GET 12
#define QSTATS_IFINDEX 1
#define QSTATS_QUEUE_TYPE 2
#define QSTATS_QUEUE_ID 3
#define QSTATS_SCOPE 4
#define QSTATS_RX_PACKETS 8
#define QSTATS_RX_BYTES 9
#define SCOPE_QUEUE 1
#define TYPE_RX 0

struct message {
	struct nlmsghdr header;
	struct genlmsghdr generic;
	char attributes[64];
};

static int control;
static uint16_t family;
static uint32_t interface;

static void fail(const char *what)
{
	perror(what);
	exit(1);
}

static void add(struct message *message, uint16_t type, const void *data, size_t bytes)
{
	struct nlattr *attribute = (void *)((char *)message + NLMSG_ALIGN(message->header.nlmsg_len));

	attribute->nla_type = type;
	attribute->nla_len = (uint16_t)(NLA_HDRLEN + bytes);
	memcpy((char *)attribute + NLA_HDRLEN, data, bytes);
	message->header.nlmsg_len = NLMSG_ALIGN(message->header.nlmsg_len) + NLA_ALIGN(attribute->nla_len);
}

static void ask(struct message *message, uint16_t type, uint16_t flags, uint8_t command)
{
	message->header.nlmsg_len = NLMSG_LENGTH(GENL_HDRLEN);
	message->header.nlmsg_type = type;
	message->header.nlmsg_flags = NLM_F_REQUEST | flags;
	message->generic.cmd = command;
	message->generic.version = 1;
}

static void put(struct message *message)
{
	if (send(control, message, message->header.nlmsg_len, 0) < 0)
		fail("send");
}

/* The value of an attribute of a message, or of 0 bytes. */
static uint64_t get(const struct nlmsghdr *header, uint16_t type)
{
	const char *at = (const char *)NLMSG_DATA(header) + GENL_HDRLEN;
	const char *end = (const char *)header + header->nlmsg_len;

	while (at + NLA_HDRLEN <= end) {
		const struct nlattr *attribute = (const void *)at;
		uint64_t value = 0;

		if ((attribute->nla_type & NLA_TYPE_MASK) == type && attribute->nla_len <= NLA_HDRLEN + sizeof(value)) {
			memcpy(&value, at + NLA_HDRLEN, attribute->nla_len - NLA_HDRLEN);
			return value;
		}
		at += NLA_ALIGN(attribute->nla_len);
	}
	return 0;
}

static void find_family(const char *name)
{
	struct message message = { 0 };
	char answer[8192];

	control = socket(AF_NETLINK, SOCK_RAW, NETLINK_GENERIC);
	if (control < 0)
		fail("socket");
	interface = if_nametoindex(name);
	if (!interface)
		fail(name);
	ask(&message, GENL_ID_CTRL, 0, CTRL_CMD_GETFAMILY);
	add(&message, CTRL_ATTR_FAMILY_NAME, "netdev", sizeof("netdev"));
	put(&message);
	if (recv(control, answer, sizeof(answer), 0) < 0)
		fail("recv");
	family = (uint16_t)get((void *)answer, CTRL_ATTR_FAMILY_ID);
	if (!family) {
		fprintf(stderr, "the kernel tells no counters of queues\n");
		exit(1);
	}
}

/* What was received through each queue: "counter" is of bytes, or of frames. */
static void read_counters(uint64_t *values, unsigned int queues, uint16_t counter)
{
	struct message message = { 0 };
	uint32_t scope = SCOPE_QUEUE;
	unsigned int seen = 0;

	ask(&message, family, NLM_F_DUMP, QSTATS_GET);
	add(&message, QSTATS_IFINDEX, &interface, sizeof(interface));
	add(&message, QSTATS_SCOPE, &scope, sizeof(scope));
	put(&message);
	for (;;) {
		static char answer[32768];
		ssize_t left = recv(control, answer, sizeof(answer), 0);
		struct nlmsghdr *header = (void *)answer;

		if (left < 0)
			fail("recv");
		for (; NLMSG_OK(header, left); header = NLMSG_NEXT(header, left)) {
			uint64_t queue = get(header, QSTATS_QUEUE_ID);

			if (header->nlmsg_type == NLMSG_DONE || header->nlmsg_type == NLMSG_ERROR) {
				if (seen == queues)
					return;
				fprintf(stderr, "counters of %u queues instead of %u\n", seen, queues);
				exit(1);
			}
			if (get(header, QSTATS_QUEUE_TYPE) != TYPE_RX || queue >= queues)
				continue;
			values[queue] = get(header, counter);
			seen++;
		}
	}
}

static void move(const char *pid, int cpu)
{
	char path[64];
	struct dirent *entry;
	int moved = 0;
	cpu_set_t set;
	DIR *threads;

	CPU_ZERO(&set);
	CPU_SET(cpu, &set);
	snprintf(path, sizeof(path), "/proc/%s/task", pid);
	threads = opendir(path);
	if (!threads)
		fail(path);
	while ((entry = readdir(threads))) {
		if (entry->d_name[0] == '.')
			continue;
		/* A thread may have ended since. */
		if (!sched_setaffinity(atoi(entry->d_name), sizeof(set), &set))
			moved++;
		else if (errno != ESRCH)
			fail("sched_setaffinity");
	}
	closedir(threads);
	if (!moved) {
		fprintf(stderr, "process %s has ended\n", pid);
		exit(1);
	}
}

static void move_all(char **pids, unsigned int processes, int cpu)
{
	unsigned int process;

	for (process = 0; process < processes; process++)
		move(pids[process], cpu);
}

/* Waits until a window of frames has come. Returns how many, and how many of them through the queue "at". */
static uint64_t window(unsigned int at, unsigned int queues, uint64_t *here)
{
	const struct timespec pause = { .tv_nsec = LOOK_NS };
	uint64_t before[MOST_CPUS], after[MOST_CPUS], frames = 0;
	unsigned int queue;

	read_counters(before, queues, QSTATS_RX_PACKETS);
	while (frames < WINDOW) {
		nanosleep(&pause, NULL);
		read_counters(after, queues, QSTATS_RX_PACKETS);
		for (frames = 0, queue = 0; queue < queues; queue++)
			frames += after[queue] - before[queue];
	}
	*here = after[at] - before[at];
	return frames;
}

static void follow(char **pids, unsigned int processes, long moves, uint64_t most, char **cpus, unsigned int queues)
{
	uint64_t here = 0, elsewhere = 0, slowest = 0, there, frames;
	long done, followed = 0;
	int stay;

	for (done = 0; done < moves; done++) {
		unsigned int at = (unsigned int)(done % queues);
		uint64_t came = 0;

		move_all(pids, processes, atoi(cpus[at]));
		for (;;) {
			frames = window(at, queues, &there);
			came += frames;
			if (there * WINDOW >= frames * FOLLOWED || came >= most)
				break;
		}
		if (there * WINDOW < frames * FOLLOWED)
			continue;
		followed++;
		if (came > slowest)
			slowest = came;
		for (stay = 0; stay < STAY_WINDOWS; stay++) {
			frames = window(at, queues, &there);
			here += there;
			elsewhere += frames - there;
		}
	}
	printf("moves %ld followed %ld slowest %llu here %llu elsewhere %llu\n", moves, followed, (unsigned long long)slowest,
	       (unsigned long long)here, (unsigned long long)elsewhere);
}

static void count(char **pids, unsigned int processes, long moves, long period, char **cpus, unsigned int queues)
{
	uint64_t before[MOST_CPUS], after[MOST_CPUS], here = 0, elsewhere = 0;
	struct timespec next;
	unsigned int queue;
	long done;

	clock_gettime(CLOCK_MONOTONIC, &next);
	for (done = 0; done < moves; done++) {
		unsigned int at = (unsigned int)(done % queues);

		move_all(pids, processes, atoi(cpus[at]));
		read_counters(before, queues, QSTATS_RX_BYTES);
		next.tv_nsec += period * 1000000;
		next.tv_sec += next.tv_nsec / 1000000000;
		next.tv_nsec %= 1000000000;
		clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &next, NULL);
		read_counters(after, queues, QSTATS_RX_BYTES);
		for (queue = 0; queue < queues; queue++)
			*(queue == at ? &here : &elsewhere) += after[queue] - before[queue];
	}
	printf("moves %ld here %llu elsewhere %llu\n", moves, (unsigned long long)here,
	       (unsigned long long)elsewhere);
}

int main(int argc, char **argv)
{
	int follows = argc > 1 && !strcmp(argv[1], "--follow");
	unsigned int queues, processes = 0;
	char *pids[MOST_PROCESSES], *pid;
	long moves, number;

	argc -= follows;
	argv += follows;
	queues = (unsigned int)argc - 5;
	if (argc < 7 || queues > MOST_CPUS) {
		fprintf(stderr, "usage: migrate PID[,PID...] INTERFACE COUNT PERIOD_MS CPU...\n"
				"       migrate --follow PID[,PID...] INTERFACE COUNT MOST CPU...\n");
		return 2;
	}
	moves = atol(argv[3]);
	number = atol(argv[4]);
	for (pid = strtok(argv[1], ","); pid && processes < MOST_PROCESSES; pid = strtok(NULL, ","))
		pids[processes++] = pid;
	find_family(argv[2]);
	if (follows)
		follow(pids, processes, moves, (uint64_t)number, argv + 5, queues);
	else
		count(pids, processes, moves, number, argv + 5, queues);
	return fflush(stdout);
}
