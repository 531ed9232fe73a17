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

/* The generic netlink family "netdev" (Documentation/netlink/specs/netdev.yaml), newer than many machines' headers. */
#define QSTATS_GET 12
#define QSTATS_IFINDEX 1
#define QSTATS_QUEUE_TYPE 2
#define QSTATS_QUEUE_ID 3
#define QSTATS_SCOPE 4
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

static void read_counters(uint64_t *bytes, unsigned int queues)
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
			bytes[queue] = get(header, QSTATS_RX_BYTES);
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

int main(int argc, char **argv)
{
	uint64_t before[MOST_CPUS], after[MOST_CPUS], here = 0, elsewhere = 0;
	unsigned int queues = (unsigned int)argc - 5, queue, processes = 0, process;
	char *pids[MOST_PROCESSES], *pid;
	struct timespec next;
	long moves, done, period;

	if (argc < 7 || queues > MOST_CPUS) {
		fprintf(stderr, "usage: migrate PID[,PID...] INTERFACE COUNT PERIOD_MS CPU...\n");
		return 2;
	}
	moves = atol(argv[3]);
	period = atol(argv[4]);
	for (pid = strtok(argv[1], ","); pid && processes < MOST_PROCESSES; pid = strtok(NULL, ","))
		pids[processes++] = pid;
	find_family(argv[2]);
	clock_gettime(CLOCK_MONOTONIC, &next);
	for (done = 0; done < moves; done++) {
		unsigned int at = (unsigned int)(done % queues);

		for (process = 0; process < processes; process++)
			move(pids[process], atoi(argv[5 + at]));
		read_counters(before, queues);
		next.tv_nsec += period * 1000000;
		next.tv_sec += next.tv_nsec / 1000000000;
		next.tv_nsec %= 1000000000;
		clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &next, NULL);
		read_counters(after, queues);
		for (queue = 0; queue < queues; queue++)
			*(queue == at ? &here : &elsewhere) += after[queue] - before[queue];
	}
	printf("moves %ld here %llu elsewhere %llu\n", moves, (unsigned long long)here,
	       (unsigned long long)elsewhere);
	return fflush(stdout);
}
