// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
/*
 * Begins so many TCP connections, no two of one address and port, to a port, and counts what answers: that somebody listens
 * (SYN and ACK), which is where a connection becomes known, or that nobody does (RST).
 *
 *	flood INTERFACE MAC ADDRESS PORT FIRST COUNT
 *
 * Frames leave by INTERFACE to the machine of that Ethernet and IPv4 address, which must have a route for what it answers.
 * Connections are numbered from FIRST; those of another number are others. No more than a window of them is under way. At the
 * end it prints
 *
 *	sent COUNT accepted COUNT refused COUNT
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <linux/if_packet.h>
#include <net/ethernet.h>
#include <net/if.h>
#include <netinet/ip.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define WINDOW 1024
/* What has not come by then was lost. */
#define PATIENCE_MS 200

struct frame {
	struct ether_header ethernet;
	struct iphdr ip;
	struct tcphdr tcp;
} __attribute__((packed));

static void fail(const char *what)
{
	perror(what);
	exit(1);
}

static uint32_t sum(const void *data, size_t bytes, uint32_t sum)
{
	const uint8_t *at = data;

	for (; bytes > 1; bytes -= 2, at += 2)
		sum += (uint32_t)at[0] << 8 | at[1];
	return sum;
}

static uint16_t folded(uint32_t sum)
{
	while (sum >> 16)
		sum = (sum & 0xffff) + (sum >> 16);
	return htons((uint16_t)~sum);
}

/* Number N is from an address below 11.0.0.0/8 and a port of its own. */
static void make(struct frame *frame, uint32_t number)
{
	uint32_t tcp;

	frame->ip.saddr = htonl(11U << 24 | (number & 0xffffff));
	frame->tcp.source = htons((uint16_t)(1024 + number % 60000));
	frame->tcp.seq = htonl(number);
	frame->ip.check = 0;
	frame->ip.check = folded(sum(&frame->ip, sizeof(frame->ip), 0));
	frame->tcp.check = 0;
	tcp = sum(&frame->ip.saddr, 8, IPPROTO_TCP + sizeof(frame->tcp));
	frame->tcp.check = folded(sum(&frame->tcp, sizeof(frame->tcp), tcp));
}

static int is_answer(const struct frame *frame, ssize_t bytes)
{
	return bytes >= (ssize_t)sizeof(*frame) && frame->ethernet.ether_type == htons(ETHERTYPE_IP) &&
	       frame->ip.protocol == IPPROTO_TCP && frame->tcp.ack && ntohl(frame->ip.daddr) >> 24 == 11;
}

int main(int argc, char **argv)
{
	struct frame frame = { 0 };
	struct sockaddr_ll place = { .sll_family = AF_PACKET, .sll_protocol = htons(ETH_P_IP) };
	unsigned long first, count, sent = 0, answered = 0, refused = 0, gone = 0;
	unsigned char mac[6];
	int control, room = 8 << 20;

	if (argc != 7 || sscanf(argv[2], "%hhx:%hhx:%hhx:%hhx:%hhx:%hhx", mac, mac + 1, mac + 2, mac + 3, mac + 4, mac + 5) != 6) {
		fprintf(stderr, "usage: flood INTERFACE MAC ADDRESS PORT FIRST COUNT\n");
		return 2;
	}
	first = strtoul(argv[5], NULL, 10);
	count = strtoul(argv[6], NULL, 10);
	memcpy(frame.ethernet.ether_dhost, mac, sizeof(mac));
	memcpy(frame.ethernet.ether_shost, "\x52\x54\x00\x78\x00\x01", 6);
	frame.ethernet.ether_type = htons(ETHERTYPE_IP);
	frame.ip.version = 4;
	frame.ip.ihl = 5;
	frame.ip.tot_len = htons(sizeof(frame.ip) + sizeof(frame.tcp));
	frame.ip.ttl = 64;
	frame.ip.protocol = IPPROTO_TCP;
	if (inet_pton(AF_INET, argv[3], &frame.ip.daddr) != 1)
		fail(argv[3]);
	frame.tcp.dest = htons((uint16_t)strtoul(argv[4], NULL, 10));
	frame.tcp.doff = 5;
	frame.tcp.syn = 1;
	frame.tcp.window = htons(1024);
	control = socket(AF_PACKET, SOCK_RAW, htons(ETH_P_IP));
	place.sll_ifindex = (int)if_nametoindex(argv[1]);
	if (control < 0 || bind(control, (struct sockaddr *)&place, sizeof(place)) ||
	    setsockopt(control, SOL_SOCKET, SO_RCVBUFFORCE, &room, sizeof(room)))
		fail(argv[1]);
	while (sent < count || answered + gone < sent) {
		struct pollfd poller = { .fd = control, .events = POLLIN };
		char answer[2048];
		ssize_t bytes;

		while (sent < count && sent - answered - gone < WINDOW) {
			make(&frame, (uint32_t)(first + sent));
			if (send(control, &frame, sizeof(frame), 0) < 0 && errno != ENOBUFS)
				fail("send");
			sent++;
		}
		switch (poll(&poller, 1, PATIENCE_MS)) {
		case 0:
			gone = sent - answered;
			continue;
		case -1:
			fail("poll");
		}
		while ((bytes = recv(control, answer, sizeof(answer), MSG_DONTWAIT)) >= 0) {
			if (!is_answer((void *)answer, bytes))
				continue;
			answered++;
			refused += ((const struct frame *)(void *)answer)->tcp.rst;
			/* One that was given up. */
			if (answered + gone > sent)
				gone = sent - answered;
		}
		if (errno != EAGAIN)
			fail("recv");
	}
	printf("sent %lu accepted %lu refused %lu\n", sent, answered - refused, refused);
	return fflush(stdout);
}
