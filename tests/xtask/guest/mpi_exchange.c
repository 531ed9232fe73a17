// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
/*
 * Messages between the processes of an MPI job, of which each looks at every byte that it gets:
 *
 *	ring BYTES	each has sent messages of all sizes to the next one, so many bytes in all
 *	sum NUMBER	a number has gone through all of them, and each has added its own
 *	all-to-all BYTES	each has sent to each, blocks of one size and blocks of all sizes
 */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>

#define ROUNDS 4
#define LARGEST (1 << 20)
#define BLOCK 20000

static int rank, ranks;

/* The byte at a place of a message. */
static unsigned char byte_of(int from, int to, int message, long at)
{
	return (unsigned char)(from * 131 + to * 31 + message * 17 + at * 7 + (at >> 8));
}

static void fill(unsigned char *data, long bytes, int from, int to, int message)
{
	for (long at = 0; at < bytes; at++)
		data[at] = byte_of(from, to, message, at);
}

static void check(const unsigned char *data, long bytes, int from, int to, int message)
{
	for (long at = 0; at < bytes; at++) {
		if (data[at] == byte_of(from, to, message, at))
			continue;
		fprintf(stderr, "Byte %ld of message %d from %d to %d is %#x\n", at, message, from, to, data[at]);
		MPI_Abort(MPI_COMM_WORLD, 1);
	}
}

static void *room(long bytes)
{
	void *data = calloc(1, bytes);

	if (!data)
		MPI_Abort(MPI_COMM_WORLD, 2);
	return data;
}

static void ring(void)
{
	static const long sizes[] = { 0, 1, 7, 64, 1000, 4096, 8193, 65536, 300001, LARGEST };
	unsigned char *out = room(LARGEST), *in = room(LARGEST);
	int next = (rank + 1) % ranks, last = (rank + ranks - 1) % ranks, message = 0, got;
	long sum = 0, bytes = 0;
	MPI_Request sent;
	MPI_Status status;

	for (int round = 0; round < ROUNDS; round++) {
		for (size_t i = 0; i < sizeof(sizes) / sizeof(*sizes); i++, message++) {
			fill(out, sizes[i], rank, next, message);
			MPI_Isend(out, sizes[i], MPI_BYTE, next, message, MPI_COMM_WORLD, &sent);
			MPI_Recv(in, LARGEST, MPI_BYTE, last, message, MPI_COMM_WORLD, &status);
			MPI_Wait(&sent, MPI_STATUS_IGNORE);
			MPI_Get_count(&status, MPI_BYTE, &got);
			if (got != sizes[i])
				MPI_Abort(MPI_COMM_WORLD, 3);
			check(in, got, last, rank, message);
			bytes += got;
		}
	}
	if (rank)
		MPI_Recv(&sum, 1, MPI_LONG, last, message, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
	sum += rank + 1;
	MPI_Send(&sum, 1, MPI_LONG, next, message, MPI_COMM_WORLD);
	if (!rank) {
		MPI_Recv(&sum, 1, MPI_LONG, last, message, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
		printf("ring %ld\nsum %ld\n", bytes, sum);
	}
	free(out);
	free(in);
}

/* How long a block of all sizes is; the sum of all of them is below that of as many of BLOCK. */
static int length(int from, int to)
{
	return (from * 7919 + to * 104729) % BLOCK;
}

static void all_to_all(void)
{
	unsigned char *out = room((long)ranks * BLOCK), *in = room((long)ranks * BLOCK);
	int *counts = room(4 * ranks * sizeof(int));
	int *sends = counts, *places = counts + ranks, *gets = counts + 2 * ranks;
	long bytes = 0;

	for (int round = 0; round < ROUNDS; round++) {
		for (int to = 0; to < ranks; to++)
			fill(out + (long)to * BLOCK, BLOCK, rank, to, round);
		MPI_Alltoall(out, BLOCK, MPI_BYTE, in, BLOCK, MPI_BYTE, MPI_COMM_WORLD);
		for (int from = 0; from < ranks; from++)
			check(in + (long)from * BLOCK, BLOCK, from, rank, round);
		bytes += (long)ranks * BLOCK;
		for (int other = 0; other < ranks; other++) {
			sends[other] = length(rank, other);
			gets[other] = length(other, rank);
			places[other] = other * BLOCK;
			bytes += gets[other];
		}
		MPI_Alltoallv(out, sends, places, MPI_BYTE, in, gets, places, MPI_BYTE, MPI_COMM_WORLD);
		for (int from = 0; from < ranks; from++)
			check(in + (long)from * BLOCK, gets[from], from, rank, round);
	}
	if (!rank)
		printf("all-to-all %ld\n", bytes);
	free(out);
	free(in);
	free(counts);
}

int main(int argc, char **argv)
{
	MPI_Init(&argc, &argv);
	MPI_Comm_rank(MPI_COMM_WORLD, &rank);
	MPI_Comm_size(MPI_COMM_WORLD, &ranks);
	ring();
	all_to_all();
	MPI_Finalize();
	return 0;
}
