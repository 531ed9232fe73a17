/* SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause */
/*
 * Two processes, two buffers: the client writes a pattern to the server's buffer, reads it back
 * and checks every byte; once asking how the transfer stands, once with a callback. Speaks with
 * the Rust example of the same name.
 *
 *	transfer serve PORT SIZE
 *	transfer HOST PORT SIZE
 *
 * Build: cc -I../include transfer.c -L. -lfarlane -o transfer
 */
#include <arpa/inet.h>
#include <errno.h>
#include <farlane.h>
#include <netdb.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

/* A transfer that takes longer than this many seconds has been lost. */
#define PATIENCE 60

static void __attribute__((noreturn, format(printf, 1, 2))) fail(const char *format, ...)
{
	va_list arguments;

	fputs("transfer: ", stderr);
	va_start(arguments, format);
	vfprintf(stderr, format, arguments);
	va_end(arguments);
	fputc('\n', stderr);
	exit(1);
}

/* Ends the program if a function of the library failed. */
static int checked(const char *what, int result)
{
	if (result < 0)
		fail("%s: %s", what, strerror(-result));
	return result;
}

static double now(void)
{
	struct timespec time;

	clock_gettime(CLOCK_MONOTONIC, &time);
	return time.tv_sec + time.tv_nsec * 1e-9;
}

static void send_all(int sock, const void *data, size_t length)
{
	for (const char *at = data; length > 0;) {
		ssize_t sent = send(sock, at, length, MSG_NOSIGNAL);

		if (sent <= 0)
			fail("The peer does not listen");
		at += sent;
		length -= sent;
	}
}

static void receive_all(int sock, void *data, size_t length)
{
	for (char *at = data; length > 0;) {
		ssize_t received = recv(sock, at, length, 0);

		if (received <= 0)
			fail("The peer has gone");
		at += received;
		length -= received;
	}
}

/* Tells the peer that this side is as far, and waits for the same word. */
static void meet_peer(int sock)
{
	char word = '.';

	send_all(sock, &word, 1);
	receive_all(sock, &word, 1);
}

static int accept_one(const char *port)
{
	struct sockaddr_in address = {
		.sin_family = AF_INET,
		.sin_port = htons(atoi(port)),
	};
	socklen_t length = sizeof(address);
	int yes = 1, listener = socket(AF_INET, SOCK_STREAM, 0), sock;

	setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes));
	if (bind(listener, (struct sockaddr *)&address, length) || listen(listener, 1) ||
	    getsockname(listener, (struct sockaddr *)&address, &length))
		fail("Port %s: %s", port, strerror(errno));
	printf("listening on port %d\n", ntohs(address.sin_port));
	fflush(stdout);
	sock = accept(listener, NULL, NULL);
	if (sock < 0)
		fail("accept: %s", strerror(errno));
	close(listener);
	return sock;
}

/* Connects, giving a server that was started at the same time a few seconds. */
static int connect_to(const char *host, const char *port)
{
	struct addrinfo hints = { .ai_family = AF_INET, .ai_socktype = SOCK_STREAM }, *found;
	double start = now();
	int error = getaddrinfo(host, port, &hints, &found);

	if (error)
		fail("%s: %s", host, gai_strerror(error));
	for (;;) {
		int sock = socket(AF_INET, SOCK_STREAM, 0);

		if (!connect(sock, found->ai_addr, found->ai_addrlen)) {
			freeaddrinfo(found);
			return sock;
		}
		if (now() - start > 10)
			fail("%s port %s: %s", host, port, strerror(errno));
		close(sock);
		usleep(100000);
	}
}

/* The words of a linear congruential generator (Knuth's MMIX), little-endian. */
static unsigned char pattern_byte(uint64_t *word, size_t at)
{
	if (at % 8 == 0)
		*word = *word * 6364136223846793005u + 1442695040888963407u;
	return *word >> (at % 8 * 8);
}

static void fill(farlane_buffer *buffer, uint64_t seed)
{
	unsigned char *bytes = farlane_buffer_address(buffer);

	for (size_t at = 0; at < farlane_buffer_length(buffer); at++)
		bytes[at] = pattern_byte(&seed, at);
}

static void check(farlane_buffer *buffer, uint64_t seed)
{
	const volatile unsigned char *bytes = farlane_buffer_address(buffer);

	for (size_t at = 0; at < farlane_buffer_length(buffer); at++)
		if (bytes[at] != pattern_byte(&seed, at))
			fail("Byte %zu of %zu is wrong", at, farlane_buffer_length(buffer));
}

/* What both sides have. */
struct party {
	farlane *library;
	farlane_buffer *buffer;
	farlane_endpoint *endpoint;
	farlane_descriptor remote;
	int sock;
};

static void set_up(struct party *party, int sock, size_t size)
{
	farlane_descriptor mine, peer;

	party->sock = sock;
	checked("farlane_init", farlane_init(NULL, &party->library));
	checked("farlane_buffer_allocate",
		farlane_buffer_allocate(party->library, size, &party->buffer));
	printf("buffer %llu: %zu bytes, placement %s\n",
	       (unsigned long long)farlane_buffer_id(party->buffer), size,
	       farlane_buffer_is_host(party->buffer) ? "Host" : "Guest");
	if (farlane_buffer_by_id(party->library, farlane_buffer_id(party->buffer)) !=
	    party->buffer)
		fail("The buffer is not found by its id");
	/* Fresh memory costs a page fault a page; the figures are to be those of the transfers. */
	memset(farlane_buffer_address(party->buffer), 0, size);
	checked("farlane_endpoint_create",
		farlane_endpoint_create(party->library, &party->endpoint));
	farlane_endpoint_describe(party->endpoint, &mine);
	send_all(sock, &mine, sizeof(mine));
	farlane_buffer_describe(party->buffer, &mine);
	send_all(sock, &mine, sizeof(mine));
	receive_all(sock, &peer, sizeof(peer));
	receive_all(sock, &party->remote, sizeof(party->remote));
	checked("farlane_endpoint_connect", farlane_endpoint_connect(party->endpoint, &peer));
	/* Neither side starts before both are connected. */
	meet_peer(sock);
}

static void clean_up(struct party *party)
{
	farlane_endpoint_free(party->endpoint);
	farlane_buffer_free(party->buffer);
	farlane_cleanup(party->library);
	close(party->sock);
}

/* One transfer of the whole buffer, asking how it stands. */
static void transfer_polling(struct party *party, farlane_direction direction)
{
	double start = now();
	farlane_id transfer;
	int state;

	checked("farlane_start",
		farlane_start(party->endpoint, direction, party->buffer, 0, &party->remote, 0,
			      farlane_buffer_length(party->buffer), NULL, NULL, &transfer));
	do {
		state = checked("farlane_query", farlane_query(party->library, transfer));
		if (now() - start > PATIENCE)
			fail("A transfer was lost");
	} while (state == FARLANE_PENDING);
}

struct finished {
	farlane_id transfer;
	int error;
};

static void on_finished(farlane_id transfer, int error, void *argument)
{
	struct finished *finished = argument;

	finished->error = error;
	finished->transfer = transfer;
}

/* One transfer of the whole buffer; the callback runs in farlane_dispatch. */
static void transfer_callback(struct party *party, farlane_direction direction)
{
	struct finished finished = { 0 };
	farlane_id transfer;

	checked("farlane_start",
		farlane_start(party->endpoint, direction, party->buffer, 0, &party->remote, 0,
			      farlane_buffer_length(party->buffer), on_finished, &finished,
			      &transfer));
	if (checked("farlane_dispatch", farlane_dispatch(party->library, PATIENCE * 1000)) != 1)
		fail("A transfer was lost");
	if (finished.error)
		fail("The transfer failed: %s", strerror(finished.error));
	if (finished.transfer != transfer)
		fail("The callback named another transfer");
}

/* Writes pattern seed to the peer, wipes the buffer, reads it back and checks it. */
static void round_trip(struct party *party, const char *name, uint64_t seed,
		       void (*transfer)(struct party *, farlane_direction))
{
	size_t length = farlane_buffer_length(party->buffer);
	double start, written, read;

	fill(party->buffer, seed);
	start = now();
	transfer(party, FARLANE_WRITE);
	written = now() - start;
	memset(farlane_buffer_address(party->buffer), 0, length);
	start = now();
	transfer(party, FARLANE_READ);
	read = now() - start;
	check(party->buffer, seed);
	printf("%s: write %.0f MB/s, read %.0f MB/s\n", name, length / written / 1e6,
	       length / read / 1e6);
}

int main(int argc, char **argv)
{
	struct party party;

	if (argc != 4)
		fail("Use: transfer serve PORT SIZE, or transfer HOST PORT SIZE");
	if (!strcmp(argv[1], "serve")) {
		set_up(&party, accept_one(argv[2]), strtoull(argv[3], NULL, 0));
		/* The client has written twice, the second pattern last. */
		meet_peer(party.sock);
		check(party.buffer, 2);
		meet_peer(party.sock);
	} else {
		set_up(&party, connect_to(argv[1], argv[2]), strtoull(argv[3], NULL, 0));
		round_trip(&party, "polling", 1, transfer_polling);
		round_trip(&party, "callback", 2, transfer_callback);
		meet_peer(party.sock);
		meet_peer(party.sock);
	}
	printf("%s: %zu bytes right\n", strcmp(argv[1], "serve") ? "client" : "server",
	       farlane_buffer_length(party.buffer));
	clean_up(&party);
	return 0;
}
