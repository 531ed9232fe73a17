// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
/*
 * A network interface (virtio 1.2, 5.1) with a host behind it: it answers who has its address, and sends back what comes to
 * UDP port FIRST_PORT + n through pair n of its queues, through which the backend then has that flow come.
 */
#include "devices.h"

#define FIRST_PORT 7000
#define MAX_PAIRS 4
#define ROOM 2048
#define HEADER 12
#define SENT_AT_ONCE 32
#define SHORTEST 60

#define TYPE_IP4 0x0800
#define TYPE_ARP 0x0806
#define ARP_REQUEST 1
#define ARP_REPLY 2
#define UDP 17

struct arp {
	uint8_t to[6], from[6];
	uint16_t type;
	uint16_t hardware, protocol;
	uint8_t hardware_length, protocol_length;
	uint16_t operation;
	uint8_t sender[6], sender_ip[4], target[6], target_ip[4];
} __attribute__((packed));

struct datagram {
	uint8_t to[6], from[6];
	uint16_t type;
	uint8_t version_length, service;
	uint16_t length, id, fragment;
	uint8_t hops, protocol;
	uint16_t checksum;
	uint8_t source[4], destination[4];
	uint16_t source_port, destination_port, udp_length, udp_checksum;
} __attribute__((packed));

struct pair {
	struct queue *receive, *send;
	char (*received)[ROOM];
	char (*sent)[ROOM];
	uint32_t sending; /* a bit for each chain */
	unsigned int datagrams, answers;
};

static const uint8_t own_ip[4] = { 10, 78, 0, 2 };
static const uint8_t peer_ip[4] = { 10, 78, 0, 1 };

static struct virtio_device *nic;
static uint8_t mac[6];
static struct pair pairs[MAX_PAIRS];
static unsigned int pair_count;
/* What the interface's queues have had that cannot be. */
static const char *wrong;

static uint16_t swapped(uint16_t value)
{
	return (uint16_t)(value << 8 | value >> 8);
}

static void give(struct pair *pair, uint16_t head)
{
	struct buffer buffer = { pair->received[head], ROOM, true };

	queue_post(pair->receive, head, &buffer, 1);
}

bool net_start(struct virtio_device *device)
{
	if (!virtio_start(device))
		return false;
	/* Receive and transmit queues in turn, and the control queue last. */
	pair_count = device->queue_count / 2;
	if (!pair_count || pair_count > MAX_PAIRS) {
		say("bad the interface has %u queues", device->queue_count);
		return false;
	}
	for (unsigned int at = 0; at < 6; at++)
		mac[at] = read8(device->config + at);
	for (unsigned int number = 0; number < pair_count; number++) {
		struct pair *pair = &pairs[number];

		pair->receive = &device->queues[2 * number];
		pair->send = &device->queues[2 * number + 1];
		pair->received = buffers(pair->receive->size * ROOM);
		pair->sent = buffers(SENT_AT_ONCE * ROOM);
		for (uint16_t head = 0; head < pair->receive->size; head++)
			give(pair, head);
	}
	nic = device;
	return true;
}

/* Takes back what was sent. */
static void reclaim(struct pair *pair)
{
	struct used_element element;

	while (queue_used(pair->send, &element)) {
		if (element.head >= SENT_AT_ONCE || !(pair->sending & 1U << element.head))
			wrong = "a frame was used that is not being sent";
		else
			pair->sending &= ~(1U << element.head);
	}
}

/* Sends a frame, if there is room; whoever asked for it asks again otherwise. */
static void send(struct pair *pair, const void *frame, uint32_t length)
{
	uint16_t head = 0;
	struct buffer buffer;

	reclaim(pair);
	while (head < SENT_AT_ONCE && pair->sending & 1U << head)
		head++;
	if (head == SENT_AT_ONCE)
		return;
	memset(pair->sent[head], 0, HEADER + SHORTEST);
	memcpy(pair->sent[head] + HEADER, frame, length);
	pair->sending |= 1U << head;
	buffer = (struct buffer){ pair->sent[head], HEADER + (length < SHORTEST ? SHORTEST : length), false };
	queue_post(pair->send, head, &buffer, 1);
}

static void send_arp(struct pair *pair, uint16_t operation, const uint8_t to[6], const uint8_t target[6])
{
	struct arp arp = {
		.type = swapped(TYPE_ARP),
		.hardware = swapped(1),
		.protocol = swapped(TYPE_IP4),
		.hardware_length = 6,
		.protocol_length = 4,
		.operation = swapped(operation),
	};

	memcpy(arp.to, to, 6);
	memcpy(arp.from, mac, 6);
	memcpy(arp.sender, mac, 6);
	memcpy(arp.sender_ip, own_ip, 4);
	memcpy(arp.target, target, 6);
	memcpy(arp.target_ip, peer_ip, 4);
	send(pair, &arp, sizeof(arp));
}

static void on_arp(struct pair *pair, const struct arp *arp)
{
	if (memcmp(arp->target_ip, own_ip, 4) || memcmp(arp->sender_ip, peer_ip, 4))
		return;
	if (arp->operation == swapped(ARP_REQUEST))
		send_arp(pair, ARP_REPLY, arp->sender, arp->sender);
	else if (arp->operation == swapped(ARP_REPLY) && !memcmp(arp->to, mac, 6))
		pair->answers++;
}

static void on_datagram(struct pair *pair, struct datagram *datagram, uint32_t length)
{
	unsigned int through = swapped(datagram->destination_port) - FIRST_PORT;
	uint8_t address[6];

	if (datagram->protocol != UDP || datagram->version_length != 0x45 || through >= pair_count ||
	    memcmp(datagram->to, mac, 6) || memcmp(datagram->destination, own_ip, 4))
		return;
	pair->datagrams++;
	memcpy(address, datagram->from, 6);
	memcpy(datagram->to, address, 6);
	memcpy(datagram->from, mac, 6);
	memcpy(address, datagram->source, 4);
	memcpy(datagram->source, datagram->destination, 4);
	memcpy(datagram->destination, address, 4);
	datagram->destination_port = datagram->source_port;
	datagram->source_port = swapped((uint16_t)(FIRST_PORT + through));
	/* None (RFC 768); that of the IP header is the same with the addresses exchanged. */
	datagram->udp_checksum = 0;
	send(&pairs[through], datagram, length);
}

static void on_frame(struct pair *pair, char *frame, uint32_t length)
{
	struct datagram *datagram = (struct datagram *)frame;

	if (length >= sizeof(struct arp) && datagram->type == swapped(TYPE_ARP))
		on_arp(pair, (struct arp *)frame);
	else if (length >= sizeof(*datagram) && datagram->type == swapped(TYPE_IP4))
		on_datagram(pair, datagram, length);
}

void net_poll(void)
{
	struct used_element element;

	for (unsigned int number = 0; number < pair_count; number++) {
		struct pair *pair = &pairs[number];

		reclaim(pair);
		while (queue_used(pair->receive, &element)) {
			if (element.head >= pair->receive->size || element.length < HEADER || element.length > ROOM) {
				wrong = "a frame was received into what is no buffer";
				continue;
			}
			on_frame(pair, pair->received[element.head] + HEADER, element.length - HEADER);
			give(pair, (uint16_t)element.head);
		}
	}
}

/* Asks through each pair who has the peer's address. */
void net_ask(void)
{
	static const uint8_t everybody[6] = { 0xff, 0xff, 0xff, 0xff, 0xff, 0xff };
	static const uint8_t nobody[6];

	for (unsigned int number = 0; number < pair_count; number++)
		send_arp(&pairs[number], ARP_REQUEST, everybody, nobody);
	say(pair_count ? "ok asked through %u pairs" : "bad there is no interface", pair_count);
}

static bool is_settled(void)
{
	for (unsigned int number = 0; number < pair_count; number++)
		if (pairs[number].sending)
			return false;
	return true;
}

/* Waits until all that was sent was used. */
void net_settle(void)
{
	struct deadline deadline = deadline_from_now();

	while (!is_settled() && !is_over(&deadline))
		net_poll();
	if (!is_settled())
		say("bad frames that were sent are not used");
	else if (wrong)
		say("bad %s", wrong);
	else
		say("ok all that was sent was used");
}

/* How many datagrams and answers to its questions came through each pair. */
void net_count(void)
{
	if (wrong) {
		say("bad %s", wrong);
		return;
	}
	say("ok pairs %u datagrams %u %u %u %u answers %u %u %u %u", pair_count, pairs[0].datagrams,
	    pairs[1].datagrams, pairs[2].datagrams, pairs[3].datagrams, pairs[0].answers, pairs[1].answers,
	    pairs[2].answers, pairs[3].answers);
}
