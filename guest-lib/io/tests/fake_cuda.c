/* SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause */
/*
 * A CUDA driver with two devices and two allocations of device memory, at addresses that neither the processor nor the kernel can use. The
 * functions are those of cuda.h that the I/O library calls. The first allocation is of a context of the program on device 0, and copies without
 * it fail, as they do in the driver. The second one is of no context, as stream-ordered memory is, and lies on device 1. Each can also be
 * mapped at the begin of a reservation of addresses, of which pointer attributes tell then. Asynchronous copies are made as late as they can be:
 * when the next one begins, or somebody waits.
 */
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>

#define SIZE (16 << 20)
#define SUCCESS 0
#define INVALID_VALUE 1
#define INVALID_CONTEXT 201
#define ALREADY_REGISTERED 712
#define LAUNCH_FAILED 719
#define CAPTURE_UNSUPPORTED 900
#define LEGACY ((void *)1)
#define BUFFERS 4

struct context {
	int device;
};

struct allocation {
	char *address;
	char content[SIZE];
	struct context *context;
	int device;
	int reserved; /* bytes of addresses that it is mapped in, if it is */
};

static struct context own[2] = { { 0 }, { 1 } }; /* made by the program */
static struct context primary[2] = { { 0 }, { 1 } };
static int retained[2];
static struct allocation allocations[2] = {
	{ .context = &own[0], .device = 0 },
	{ .context = 0, .device = 1 },
};
static struct buffer { /* of the host, registered */
	uintptr_t start;
	size_t bytes;
} buffers[BUFFERS];
static int registered; /* of them */
static int registers; /* whether it can */
static int working = 1 << 30; /* copies until one fails */
static int attempts; /* to register one */
static int refused; /* waits are */
static int unmapping; /* with each copy */
static uintptr_t reservation; /* of both allocations, if there is one */
static __thread struct pending {
	char *to;
	const char *from;
	size_t bytes;
} pending[2]; /* of each device */
static __thread struct context *current;
static __thread struct context *below;

/* Not CUDA's: allocates, frees, and tells what is in device memory. */
void *fake_allocate(int which)
{
	char *address = mmap(0, 2 * SIZE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	allocations[which].address = address;
	allocations[which].reserved = 0;
	return address;
}

/* As after cuMemAddressReserve of twice as much, and cuMemMap at its begin. */
void *fake_map(int which)
{
	char *address = fake_allocate(which);

	allocations[which].reserved = 2 * SIZE;
	return address;
}

/* Allocates behind where it lay before, in part at the same addresses. */
void *fake_allocate_behind(int which, char *before, int bytes)
{
	allocations[which].address = before + bytes;
	return allocations[which].address;
}

void fake_free(int which)
{
	allocations[which].address = 0;
}

char *fake_content(int which)
{
	return allocations[which].content;
}

/* Makes the program's context of a device current, or none; tells whether another one was left behind. */
int fake_make_current(int device, int before)
{
	struct context *was = before < 0 ? 0 : &own[before];
	int as_it_was = current == was && !below;

	current = device < 0 ? 0 : &own[device];
	return as_it_was;
}

int fake_retained(int device)
{
	return retained[device];
}

/* How many buffers of the host are registered; from now on so many can be. */
int fake_register(int most)
{
	registers = most;
	return registered;
}

/* After so many copies each fails. */
void fake_break_after(int copies)
{
	working = copies;
}

int fake_attempts(void)
{
	return attempts;
}

/* Waits fail at once, while copies are under way. */
void fake_refuse_waits(int refuse)
{
	refused = refuse;
}

/* Each copy unmaps a page of the first allocation, as a driver that gives back what it had there. */
void fake_unmap_with_copies(int unmap)
{
	unmapping = unmap;
}

/* Maps both, of two devices, one behind the other in one reservation of addresses. */
char *fake_map_both(void)
{
	char *address = mmap(0, 2 * SIZE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	for (int which = 0; which < 2; which++) {
		allocations[which].address = address + which * SIZE;
		allocations[which].reserved = 0;
	}
	reservation = (uintptr_t)address;
	return address;
}

static struct allocation *find(uint64_t at, size_t bytes)
{
	for (int which = 0; which < 2; which++) {
		struct allocation *found = &allocations[which];
		uint64_t start = (uintptr_t)found->address;

		if (found->address && at >= start && at - start + bytes <= SIZE)
			return found;
	}
	return 0;
}

static int length(const struct allocation *of)
{
	return of->reserved ? of->reserved : SIZE;
}

int cuPointerGetAttribute(void *data, int attribute, uint64_t at)
{
	struct allocation *found = 0;

	for (int which = 0; which < registered && attribute == 2; which++)
		if (at - buffers[which].start < buffers[which].bytes) {
			*(unsigned int *)data = 1;
			return SUCCESS;
		}
	for (int which = 0; which < 2; which++) {
		struct allocation *other = &allocations[which];

		if (other->address && at - (uintptr_t)other->address < (uint64_t)length(other))
			found = other;
	}
	if (!found)
		return INVALID_VALUE;
	switch (attribute) {
	case 1:
		*(void **)data = found->context;
		return SUCCESS;
	case 2:
		*(unsigned int *)data = 2;
		return SUCCESS;
	case 9:
		*(int *)data = found->device;
		return SUCCESS;
	case 11:
		*(uint64_t *)data = reservation ? reservation : (uintptr_t)found->address;
		return SUCCESS;
	case 12:
		*(size_t *)data = reservation ? 2 * SIZE : length(found);
		return SUCCESS;
	case 13:
		*(int *)data = find(at, 1) != 0;
		return SUCCESS;
	}
	return INVALID_VALUE;
}

int cuThreadExchangeStreamCaptureMode(int *mode)
{
	static __thread int now;
	int before = now;

	now = *mode;
	*mode = before;
	return SUCCESS;
}

int cuCtxGetDevice(int *device)
{
	if (!current)
		return INVALID_CONTEXT;
	*device = current->device;
	return SUCCESS;
}

int cuDeviceGet(int *device, int ordinal)
{
	if (ordinal < 0 || ordinal > 1)
		return INVALID_VALUE;
	*device = ordinal;
	return SUCCESS;
}

int cuDevicePrimaryCtxRetain(void **context, int device)
{
	retained[device]++;
	*context = &primary[device];
	return SUCCESS;
}

int cuCtxPushCurrent_v2(void *pushed)
{
	if (!pushed || below)
		return INVALID_CONTEXT;
	below = current;
	current = pushed;
	return SUCCESS;
}

int cuCtxPopCurrent_v2(void **popped)
{
	if (!current)
		return INVALID_CONTEXT;
	*popped = current;
	current = below;
	below = 0;
	return SUCCESS;
}

/* What a copy may be made with. */
static int fits(const struct allocation *found)
{
	if (found->context)
		return current == found->context;
	return current && current->device == found->device &&
	       (current != &primary[found->device] || retained[found->device]);
}

static int find_for(uint64_t at, size_t bytes, char **content)
{
	struct allocation *found = find(at, bytes);

	if (!found)
		return INVALID_VALUE;
	if (!fits(found))
		return INVALID_CONTEXT;
	*content = found->content + (at - (uintptr_t)found->address);
	return SUCCESS;
}

static int end_pending(int device)
{
	struct pending now = pending[device];

	pending[device].bytes = 0;
	if (!now.bytes)
		return SUCCESS;
	if (working-- <= 0)
		return LAUNCH_FAILED;
	memcpy(now.to, now.from, now.bytes);
	return SUCCESS;
}

static int is_registered(const void *buffer, size_t bytes)
{
	for (int which = 0; which < registered; which++) {
		uintptr_t at = (uintptr_t)buffer - buffers[which].start;

		if (at < buffers[which].bytes)
			return at + bytes <= buffers[which].bytes;
	}
	return 0;
}

static int begin(char *to, const char *from, size_t bytes, int pinned)
{
	int device = current->device;
	int status = end_pending(device);

	if (unmapping)
		munmap(allocations[0].address + SIZE / 2, 4096);
	pending[device] = (struct pending){ to, from, bytes };
	return status || pinned ? status : end_pending(device);
}

int cuMemHostRegister_v2(void *buffer, size_t bytes, unsigned int flags)
{
	attempts++;
	if (!current || flags != 1)
		return INVALID_CONTEXT;
	if (is_registered(buffer, bytes))
		return ALREADY_REGISTERED;
	if (registered >= registers || registered >= BUFFERS)
		return INVALID_VALUE;
	buffers[registered++] = (struct buffer){ (uintptr_t)buffer, bytes };
	return SUCCESS;
}

int cuMemcpyHtoDAsync_v2(uint64_t to, const void *from, size_t bytes, void *stream)
{
	char *content = 0;
	int status = stream == LEGACY ? find_for(to, bytes, &content) : INVALID_VALUE;

	return status ? status : begin(content, from, bytes, is_registered(from, bytes));
}

int cuMemcpyDtoHAsync_v2(void *to, uint64_t from, size_t bytes, void *stream)
{
	char *content = 0;
	int status = stream == LEGACY ? find_for(from, bytes, &content) : INVALID_VALUE;

	return status ? status : begin(to, content, bytes, is_registered(to, bytes));
}

int cuStreamSynchronize(void *stream)
{
	if (!current || stream != LEGACY)
		return INVALID_CONTEXT;
	return refused ? CAPTURE_UNSUPPORTED : end_pending(current->device);
}

int cuMemcpyHtoD_v2(uint64_t to, const void *from, size_t bytes)
{
	char *content = 0;
	int status = find_for(to, bytes, &content);

	return status ? status : begin(content, from, bytes, 0);
}

int cuMemcpyDtoH_v2(void *to, uint64_t from, size_t bytes)
{
	char *content = 0;
	int status = find_for(from, bytes, &content);

	return status ? status : begin(to, content, bytes, 0);
}
