// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
/*
 * Talks over reliable datagram sockets (AF_RDS), of which each byte is looked at:
 *
 *	rds_talk serve ADDRESS PORT		answers until it is ended
 *	rds_talk ask OWN ADDRESS PORT COUNT	so many messages of each size, and their answers
 *
 * A message has its number before its bytes; its answer has the same number and other bytes. With every fourth one
 * memory is lent, into which the answer's bytes are written by RDMA before the answer comes.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <linux/rds.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#ifndef SOL_RDS
#define SOL_RDS 276
#endif

#define LARGEST (256 << 10)
#define ROOM (2 << 20)

struct header {
	uint32_t number;
	uint32_t bytes;
};

struct message {
	struct header header;
	unsigned char data[LARGEST];
};

static struct message in, out;

static void check(int good, const char *what)
{
	if (good)
		return;
	fprintf(stderr, "%s: %s\n", what, strerror(errno));
	exit(1);
}

static unsigned char byte_of(uint32_t number, int is_answer, uint32_t at)
{
	return (unsigned char)(number * 29 + is_answer * 101 + at * 13 + (at >> 8));
}

static void fill(unsigned char *data, uint32_t bytes, uint32_t number, int is_answer)
{
	for (uint32_t at = 0; at < bytes; at++)
		data[at] = byte_of(number, is_answer, at);
}

static void look(const unsigned char *data, uint32_t bytes, uint32_t number, int is_answer)
{
	for (uint32_t at = 0; at < bytes; at++) {
		if (data[at] == byte_of(number, is_answer, at))
			continue;
		fprintf(stderr, "Byte %u of %s %u is %#x\n", at, is_answer ? "answer" : "message", number, data[at]);
		exit(1);
	}
}

static struct sockaddr_in address_of(const char *text, const char *port)
{
	struct sockaddr_in address = { .sin_family = AF_INET, .sin_port = htons(atoi(port)) };

	check(inet_pton(AF_INET, text, &address.sin_addr) == 1, text);
	return address;
}

static int bound(struct sockaddr_in own)
{
	int s = socket(AF_RDS, SOCK_SEQPACKET, 0), room = ROOM, transport = RDS_TRANS_IB;

	check(s >= 0, "socket");
	check(!setsockopt(s, SOL_SOCKET, SO_SNDBUFFORCE, &room, sizeof(room)), "SO_SNDBUFFORCE");
	check(!setsockopt(s, SOL_SOCKET, SO_RCVBUFFORCE, &room, sizeof(room)), "SO_RCVBUFFORCE");
	check(!setsockopt(s, SOL_RDS, SO_RDS_TRANSPORT, &transport, sizeof(transport)), "SO_RDS_TRANSPORT");
	check(!bind(s, (struct sockaddr *)&own, sizeof(own)), "bind");
	return s;
}

/* Sends a message with as many of its bytes as are said, and with a control message. */
static void send_with(int s, struct sockaddr_in *to, struct message *message, uint32_t bytes, int type, const void *data,
		      size_t length)
{
	union {
		struct cmsghdr header;
		char room[CMSG_SPACE(sizeof(struct rds_rdma_args))];
	} control = { 0 };
	struct iovec part = { message, sizeof(message->header) + bytes };
	struct msghdr header = { .msg_name = to, .msg_namelen = sizeof(*to), .msg_iov = &part, .msg_iovlen = 1 };

	if (data) {
		header.msg_control = control.room;
		header.msg_controllen = CMSG_SPACE(length);
		control.header.cmsg_level = SOL_RDS;
		control.header.cmsg_type = type;
		control.header.cmsg_len = CMSG_LEN(length);
		memcpy(CMSG_DATA(&control.header), data, length);
	}
	check(sendmsg(s, &header, 0) == (ssize_t)part.iov_len, "sendmsg");
}

static void send_to(int s, struct sockaddr_in *to, struct message *message)
{
	send_with(s, to, message, message->header.bytes, 0, NULL, 0);
}

/* Writes a message's bytes into memory that the receiver has lent, and sends its number. */
static void write_to(int s, struct sockaddr_in *to, struct message *message, uint64_t cookie)
{
	struct rds_iovec local = { .addr = (uintptr_t)message->data, .bytes = message->header.bytes };
	struct rds_rdma_args args = {
		.cookie = cookie,
		.remote_vec = { .addr = 0, .bytes = message->header.bytes },
		.local_vec_addr = (uintptr_t)&local,
		.nr_local = 1,
		.flags = RDS_RDMA_READWRITE | RDS_RDMA_FENCE,
	};

	send_with(s, to, message, 0, RDS_CMSG_RDMA_ARGS, &args, sizeof(args));
}

/* Sends a message, and with it lends memory for its answer, once. */
static void lend_to(int s, struct sockaddr_in *to, struct message *message, unsigned char *memory)
{
	uint64_t cookie;
	struct rds_get_mr_args args = {
		.vec = { .addr = (uintptr_t)memory, .bytes = message->header.bytes },
		.cookie_addr = (uintptr_t)&cookie,
		.flags = RDS_RDMA_READWRITE | RDS_RDMA_USE_ONCE,
	};

	send_with(s, to, message, message->header.bytes, RDS_CMSG_RDMA_MAP, &args, sizeof(args));
}

/* Receives a message; returns how many bytes there are, and of memory that is lent with it the cookie, else zero. */
static size_t receive(int s, struct sockaddr_in *from, uint64_t *cookie)
{
	union {
		struct cmsghdr header;
		char room[256];
	} control;
	struct iovec part = { &in, sizeof(in) };
	struct msghdr header = {
		.msg_name = from,
		.msg_namelen = sizeof(*from),
		.msg_iov = &part,
		.msg_iovlen = 1,
		.msg_control = control.room,
		.msg_controllen = sizeof(control.room),
	};
	ssize_t bytes = recvmsg(s, &header, 0);

	check(bytes >= (ssize_t)sizeof(in.header), "recvmsg");
	*cookie = 0;
	for (struct cmsghdr *c = CMSG_FIRSTHDR(&header); c; c = CMSG_NXTHDR(&header, c)) {
		if (c->cmsg_level == SOL_RDS && c->cmsg_type == RDS_CMSG_RDMA_DEST)
			memcpy(cookie, CMSG_DATA(c), sizeof(*cookie));
	}
	return bytes - sizeof(in.header);
}

static void serve(int s)
{
	struct sockaddr_in from;
	uint64_t cookie;

	printf("ready\n");
	fflush(stdout);
	for (;;) {
		size_t bytes = receive(s, &from, &cookie);

		check(bytes == in.header.bytes && bytes <= LARGEST, "a message of another length");
		look(in.data, bytes, in.header.number, 0);
		out.header = in.header;
		fill(out.data, bytes, in.header.number, 1);
		if (cookie)
			write_to(s, &from, &out, cookie);
		else
			send_to(s, &from, &out);
	}
}

static void ask(int s, struct sockaddr_in *peer, int count)
{
	static const uint32_t sizes[] = { 1, 64, 4096, 9000, 65536, LARGEST };
	unsigned char *memory = mmap(NULL, LARGEST, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	uint32_t number = 0;
	long by_message = 0, by_rdma = 0;
	uint64_t none;

	check(memory != MAP_FAILED, "mmap");
	for (int round = 0; round < count; round++) {
		for (size_t i = 0; i < sizeof(sizes) / sizeof(*sizes); i++, number++) {
			int is_lent = number % 4 == 3;
			size_t bytes;

			memset(memory, 0, LARGEST);
			out.header = (struct header){ .number = number, .bytes = sizes[i] };
			fill(out.data, sizes[i], number, 0);
			if (is_lent)
				lend_to(s, peer, &out, memory);
			else
				send_to(s, peer, &out);
			bytes = receive(s, peer, &none);
			check(in.header.number == number && bytes == (is_lent ? 0 : sizes[i]), "another answer");
			look(is_lent ? memory : in.data, sizes[i], number, 1);
			by_message += sizes[i] + bytes;
			by_rdma += is_lent ? sizes[i] : 0;
		}
	}
	printf("messages %u, bytes %ld, by RDMA %ld\n", number, by_message, by_rdma);
}

int main(int argc, char **argv)
{
	if (argc == 4 && !strcmp(argv[1], "serve")) {
		serve(bound(address_of(argv[2], argv[3])));
	} else if (argc == 6 && !strcmp(argv[1], "ask")) {
		struct sockaddr_in peer = address_of(argv[3], argv[4]);

		ask(bound(address_of(argv[2], "0")), &peer, atoi(argv[5]));
	} else {
		fprintf(stderr, "rds_talk serve ADDRESS PORT | rds_talk ask OWN ADDRESS PORT COUNT\n");
		return 2;
	}
	return 0;
}
