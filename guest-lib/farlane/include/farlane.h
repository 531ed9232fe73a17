/* SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause */
/*
 * libfarlane: buffers, transfers and callbacks.
 *
 * Functions that return int return zero or a positive count on success and a negative errno
 * value on failure, unless they say otherwise. All functions may be called from any thread.
 * Objects do not survive fork() into the child.
 */
#ifndef FARLANE_H
#define FARLANE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The library, initialised on one device. */
typedef struct farlane farlane;
/* Memory of this process that transfers use. */
typedef struct farlane_buffer farlane_buffer;
/* One end of a connection between two processes. */
typedef struct farlane_endpoint farlane_endpoint;

/* The number of a buffer, an endpoint or a transfer: unique in its library, never zero. */
typedef uint64_t farlane_id;

/*
 * What a peer must know of an endpoint or a buffer. Carry the bytes to the peer by any means;
 * they mean the same on every machine. A buffer's descriptor is the right to read and write it.
 */
typedef struct {
	unsigned char bytes[64];
} farlane_descriptor;

/* Which way a transfer goes. */
typedef enum {
	FARLANE_WRITE = 0, /* from the local buffer to the peer's */
	FARLANE_READ = 1,  /* from the peer's buffer to the local one */
} farlane_direction;

/* Answer of farlane_query: the transfer is on its way. */
#define FARLANE_PENDING 1

/*
 * Called when a transfer has finished: error is zero or a positive errno value. It may start
 * transfers and ask for others, and should return soon: callbacks run one after the other.
 */
typedef void (*farlane_callback)(farlane_id transfer, int error, void *argument);

/*
 * Initialises the library on the device of that name ("farlane0"), or on the first one when
 * device is NULL.
 */
int farlane_init(const char *device, farlane **library);

/*
 * Cleans up: ends the dispatcher thread, then releases the library. Buffers and endpoints must
 * be freed, but may be freed later.
 */
void farlane_cleanup(farlane *library);

/* Allocates a zeroed buffer, in host memory where the device has a window. */
int farlane_buffer_allocate(farlane *library, size_t length, farlane_buffer **buffer);

/* Frees a buffer. Its memory stays until the last transfer that uses it has finished. */
void farlane_buffer_free(farlane_buffer *buffer);

/* First byte. Peers may change the memory at any time. */
void *farlane_buffer_address(const farlane_buffer *buffer);
/* Length in bytes, as asked for. */
size_t farlane_buffer_length(const farlane_buffer *buffer);
/* Not zero: the memory was allocated by the host. */
int farlane_buffer_is_host(const farlane_buffer *buffer);
/* Its number. */
farlane_id farlane_buffer_id(const farlane_buffer *buffer);
/* The buffer with that number, or NULL. Valid until it is freed. */
farlane_buffer *farlane_buffer_by_id(farlane *library, farlane_id id);
/* What a peer must be told to reach it. */
void farlane_buffer_describe(const farlane_buffer *buffer, farlane_descriptor *descriptor);

/* Makes an endpoint. */
int farlane_endpoint_create(farlane *library, farlane_endpoint **endpoint);
/* Frees an endpoint, when its last transfer has finished. */
void farlane_endpoint_free(farlane_endpoint *endpoint);
/* Its number. */
farlane_id farlane_endpoint_id(const farlane_endpoint *endpoint);
/* The endpoint with that number, or NULL. Valid until it is freed. */
farlane_endpoint *farlane_endpoint_by_id(farlane *library, farlane_id id);
/* What a peer must be told to connect to it. */
void farlane_endpoint_describe(const farlane_endpoint *endpoint, farlane_descriptor *descriptor);

/*
 * Connects to the peer's endpoint. The peer does the same with this one's descriptor; neither
 * starts a transfer before both have done so.
 */
int farlane_endpoint_connect(farlane_endpoint *endpoint, const farlane_descriptor *remote);

/*
 * Starts a transfer of length bytes between local + local_offset and the peer's buffer remote +
 * remote_offset. Never blocks: -EAGAIN when too many transfers are outstanding. With a callback
 * (not NULL) it is called once, with argument; without one the program asks farlane_query.
 * Stores the transfer's number to *transfer if that is not NULL; the callback may come first.
 */
int farlane_start(farlane_endpoint *endpoint, farlane_direction direction,
		  farlane_buffer *local, size_t local_offset,
		  const farlane_descriptor *remote, uint64_t remote_offset, size_t length,
		  farlane_callback callback, void *argument, farlane_id *transfer);

/*
 * How a transfer stands: FARLANE_PENDING, 0 when it is done, or a negative errno value when it
 * failed (-ENOENT: no such transfer). The answer that it has finished is given once.
 */
int farlane_query(farlane *library, farlane_id transfer);

/*
 * Runs callbacks that are due, in the calling thread; waits for one for up to timeout_ms (-1: as
 * long as it takes) if there is none. Returns how many it ran.
 */
int farlane_dispatch(farlane *library, int timeout_ms);

/* Runs callbacks in a thread of the library from now on. */
int farlane_dispatcher_start(farlane *library);
/* Ends that thread. When this returns no callback runs in it. */
void farlane_dispatcher_stop(farlane *library);

#ifdef __cplusplus
}
#endif

#endif /* FARLANE_H */
