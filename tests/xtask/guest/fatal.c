// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
/*
 * Waits for the end of an RDMA device, as a program has to that wants to survive it:
 *
 *	ready
 *	fatal SECONDS late SECONDS	when the event came by the clock of /proc/uptime, and how much later than
 *					asked for a thread that only sleeps was woken up to then, all in all
 *	open ERROR in SECONDS		how it went to open the dead device again
 *
 * Then it keeps the device open until SIGTERM, and releases everything in order. It also has a buffer in host memory,
 * which it can read and write at any time, whether the device is there or not; but not where it is built for the
 * distribution's library alone (fatal_stock.c).
 */
#define _GNU_SOURCE
#include <errno.h>
#ifndef WITHOUT_BUFFER
#include <farlane.h>
#endif
#include <infiniband/verbs.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define BYTES (4 << 20)
#define NAP_NS 100000000L

static _Atomic double late;

static double now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_BOOTTIME, &t);
	return t.tv_sec + t.tv_nsec / 1e9;
}

static void *measure(void *unused)
{
	const struct timespec nap = { .tv_nsec = NAP_NS };
	double began;

	for (;;) {
		began = now();
		nanosleep(&nap, NULL);
		late = late + (now() - began - NAP_NS / 1e9);
	}
	return unused;
}

static void check(int good, const char *what)
{
	if (good)
		return;
	fprintf(stderr, "%s: %s\n", what, strerrorname_np(errno));
	exit(1);
}

#ifdef WITHOUT_BUFFER
static void buffer_allocate(void) {}
static void buffer_touch(void) {}
static void buffer_free(void) {}
#else
static farlane *library;
static farlane_buffer *host;

/* Reads and writes all pages. */
static void buffer_touch(void)
{
	volatile char *byte = farlane_buffer_address(host);
	size_t at;

	for (at = 0; at < farlane_buffer_length(host); at += 4096)
		byte[at]++;
}

static void buffer_allocate(void)
{
	check(farlane_init(NULL, &library) == 0, "farlane_init");
	check(farlane_buffer_allocate(library, BYTES, &host) == 0, "farlane_buffer_allocate");
	check(farlane_buffer_is_host(host), "not in host memory");
}

static void buffer_free(void)
{
	farlane_buffer_free(host);
	farlane_cleanup(library);
}
#endif

int main(void)
{
	struct ibv_async_event event;
	struct ibv_context *context, *again;
	struct ibv_device **devices;
	struct ibv_cq *cq;
	struct ibv_mr *mr;
	struct ibv_pd *pd;
	pthread_t thread;
	sigset_t term;
	double began;
	void *buffer;
	int caught;

	sigemptyset(&term);
	sigaddset(&term, SIGTERM);
	sigprocmask(SIG_BLOCK, &term, NULL);
	setvbuf(stdout, NULL, _IOLBF, 0);

	devices = ibv_get_device_list(NULL);
	check(devices && devices[0], "no device");
	context = ibv_open_device(devices[0]);
	check(context != NULL, "ibv_open_device");
	pd = ibv_alloc_pd(context);
	check(pd != NULL, "ibv_alloc_pd");
	buffer = aligned_alloc(4096, BYTES);
	check(buffer != NULL, "aligned_alloc");
	mr = ibv_reg_mr(pd, buffer, BYTES, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
	check(mr != NULL, "ibv_reg_mr");
	cq = ibv_create_cq(context, 16, NULL, NULL, 0);
	check(cq != NULL, "ibv_create_cq");
	buffer_allocate();
	buffer_touch();
	check(pthread_create(&thread, NULL, measure, NULL) == 0, "pthread_create");
	printf("ready\n");

	do {
		check(ibv_get_async_event(context, &event) == 0, "ibv_get_async_event");
		ibv_ack_async_event(&event);
	} while (event.event_type != IBV_EVENT_DEVICE_FATAL);
	printf("fatal %.3f late %.3f\n", now(), late);

	buffer_touch();

	errno = 0;
	began = now();
	again = ibv_open_device(devices[0]);
	printf("open %s in %.3f\n", again ? "works" : strerrorname_np(errno), now() - began);

	check(sigwait(&term, &caught) == 0, "sigwait");
	buffer_touch();
	/* Errors are in order here, a hang or a crash is not. */
	buffer_free();
	ibv_destroy_cq(cq);
	ibv_dereg_mr(mr);
	ibv_dealloc_pd(pd);
	ibv_close_device(context);
	ibv_free_device_list(devices);
	free(buffer);
	printf("closed\n");
	return 0;
}
