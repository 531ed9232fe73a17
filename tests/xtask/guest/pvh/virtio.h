/* SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause */
/* Virtio over PCI (virtio 1.2, 4.1) with split queues (2.7), which are polled. */
#ifndef VIRTIO_H
#define VIRTIO_H

#include "pci.h"

#define VIRTIO_VENDOR 0x1af4
#define VIRTIO_FIRST_ID 0x1040
#define VIRTIO_MAX_QUEUES 16
#define VIRTIO_MAX_SIZE 256

#define VIRTIO_F_VERSION_1 32
#define VIRTIO_BIT(number) (1ULL << (number))

/* A buffer of a chain. */
struct buffer {
	const volatile void *memory;
	uint32_t length;
	bool device_writes;
};

struct descriptor {
	uint64_t address;
	uint32_t length;
	uint16_t flags;
	uint16_t next;
};

struct used_element {
	uint32_t head;
	uint32_t length;
};

struct queue {
	uint16_t number;
	uint16_t size;
	volatile struct descriptor *descriptors;
	volatile uint16_t *available; /* flags, index, heads */
	volatile uint16_t *used; /* flags, index, elements */
	void *bell;
	/* Chains that were made available, and those that were seen used. */
	uint16_t posted;
	uint16_t seen;
};

struct virtio_device {
	unsigned int slot;
	uint16_t type;
	char *common;
	char *notify;
	uint32_t notify_multiplier;
	char *config;
	uint64_t features;
	uint16_t queue_count;
	struct queue queues[VIRTIO_MAX_QUEUES];
};

/* Looks at a function. Whether it is a virtio device. */
bool virtio_find(struct virtio_device *device, unsigned int slot);

/* Resets it, takes all the features that this driver can have, makes all queues, and starts it. Says why not. */
bool virtio_start(struct virtio_device *device);

/* Makes a chain available that begins at descriptor `head`, and tells the device. */
void queue_post(struct queue *queue, uint16_t head, const struct buffer *buffers, unsigned int count);

/* The next chain that was used, if there is one. */
bool queue_used(struct queue *queue, struct used_element *element);

/* How many chains are available and not used; more than were posted is less than nothing. */
static inline int queue_waiting(const struct queue *queue)
{
	fence();
	return (int16_t)(queue->posted - queue->used[1]);
}

#endif
