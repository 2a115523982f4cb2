// Emulates NCCL. A collective returns at once and communicates with no other rank. Its event contains the bytes of the
// larger buffer. A result of up to 64 KiB is this rank's data, as if every rank had sent the same data. Therefore, rank
// 0 of a job can run without the other ranks. Two processes under torchrun never wait for each other, so hangs and
// mismatched calls go unnoticed.
#include "device_memory.h"
#include "record.h"

#include <nccl.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

struct ncclComm {
  int rank, ranks;
};

static size_t element_bytes(ncclDataType_t type) {
  switch (type) {
  case ncclInt64:
  case ncclUint64:
  case ncclFloat64: return 8;
  case ncclInt32:
  case ncclUint32:
  case ncclFloat32: return 4;
  case ncclFloat16:
  case ncclBfloat16: return 2;
  default: return 1;
  }
}

static ncclResult_t collective(const char *name, size_t count, ncclDataType_t type, ncclComm_t group,
                               cudaStream_t stream) {
  record((Event){.kind = COLLECTIVE,
                 .name = name,
                 .stream = (uint64_t)stream,
                 .bytes = count * element_bytes(type),
                 .ranks = group->ranks});
  return ncclSuccess;
}

static void move_result(const void *from, void *to, size_t count, ncclDataType_t type, int copies) {
  size_t bytes = count * element_bytes(type);
  if (bytes * copies > MAX_COPIED) return;
  for (int i = 0; i < copies; i++) memmove((char *)contents(to) + i * bytes, contents(from), bytes);
  keep_result(to, bytes * copies);
}

// ---- communicators

static ncclResult_t communicator(ncclComm_t *group, const char *name, int rank, int ranks) {
  *group = malloc(sizeof **group);
  **group = (struct ncclComm){rank, ranks};
  record((Event){.kind = COMMUNICATOR, .name = name, .ranks = ranks});
  return ncclSuccess;
}

ncclResult_t ncclGetVersion(int *version) {
  *version = NCCL_VERSION_CODE;
  return ncclSuccess;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
  memset(id, 0, sizeof *id);
  return ncclSuccess;
}

ncclResult_t ncclCommInitRank(ncclComm_t *group, int ranks, ncclUniqueId id, int rank) {
  return communicator(group, "ncclCommInitRank", rank, ranks);
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t *group, int ranks, ncclUniqueId id, int rank, ncclConfig_t *config) {
  return communicator(group, "ncclCommInitRankConfig", rank, ranks);
}

ncclResult_t ncclCommInitRankScalable(ncclComm_t *group, int ranks, int rank, int id_count, ncclUniqueId *ids,
                                      ncclConfig_t *config) {
  return communicator(group, "ncclCommInitRankScalable", rank, ranks);
}

// It is unknown which other ranks call this with the same color, so the new communicator has all ranks of its parent.
ncclResult_t ncclCommSplit(ncclComm_t parent, int color, int key, ncclComm_t *part, ncclConfig_t *config) {
  return communicator(part, "ncclCommSplit", parent->rank, parent->ranks);
}

ncclResult_t ncclCommCount(const ncclComm_t group, int *count) {
  *count = group->ranks;
  return ncclSuccess;
}

ncclResult_t ncclCommUserRank(const ncclComm_t group, int *rank) {
  *rank = group->rank;
  return ncclSuccess;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t group, ncclResult_t *error) {
  *error = ncclSuccess;
  return ncclSuccess;
}

const char *ncclGetErrorString(ncclResult_t result) { return result == ncclSuccess ? "no error" : "unknown error"; }
const char *ncclGetLastError(ncclComm_t group) { return ""; }

ncclResult_t ncclCommRegister(const ncclComm_t group, void *buffer, size_t bytes, void **handle) {
  *handle = buffer;
  return ncclSuccess;
}

ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t *operation, void *scalar, ncclDataType_t type,
                                      ncclScalarResidence_t residence, ncclComm_t group) {
  *operation = ncclSum;
  return ncclSuccess;
}

// ---- collectives

ncclResult_t ncclAllReduce(const void *from, void *to, size_t count, ncclDataType_t type, ncclRedOp_t operation,
                           ncclComm_t group, cudaStream_t stream) {
  move_result(from, to, count, type, 1);
  return collective("AllReduce", count, type, group, stream);
}

ncclResult_t ncclReduce(const void *from, void *to, size_t count, ncclDataType_t type, ncclRedOp_t operation, int root,
                        ncclComm_t group, cudaStream_t stream) {
  if (group->rank == root) move_result(from, to, count, type, 1);
  return collective("Reduce", count, type, group, stream);
}

ncclResult_t ncclBroadcast(const void *from, void *to, size_t count, ncclDataType_t type, int root, ncclComm_t group,
                           cudaStream_t stream) {
  move_result(from, to, count, type, 1);
  return collective("Broadcast", count, type, group, stream);
}

ncclResult_t ncclBcast(void *buffer, size_t count, ncclDataType_t type, int root, ncclComm_t group,
                       cudaStream_t stream) {
  return collective("Broadcast", count, type, group, stream);
}

ncclResult_t ncclAllGather(const void *from, void *to, size_t count, ncclDataType_t type, ncclComm_t group,
                           cudaStream_t stream) {
  move_result(from, to, count, type, group->ranks);
  return collective("AllGather", count * group->ranks, type, group, stream);
}

ncclResult_t ncclReduceScatter(const void *from, void *to, size_t count, ncclDataType_t type, ncclRedOp_t operation,
                               ncclComm_t group, cudaStream_t stream) {
  size_t offset = group->rank * count * element_bytes(type);
  move_result((const char *)from + offset, to, count, type, 1);
  return collective("ReduceScatter", count * group->ranks, type, group, stream);
}

ncclResult_t ncclAlltoAll(const void *from, void *to, size_t count, ncclDataType_t type, ncclComm_t group,
                          cudaStream_t stream) {
  move_result(from, to, count * group->ranks, type, 1);
  return collective("AlltoAll", count * group->ranks, type, group, stream);
}

ncclResult_t ncclSend(const void *from, size_t count, ncclDataType_t type, int peer, ncclComm_t group,
                      cudaStream_t stream) {
  return collective("Send", count, type, group, stream);
}

ncclResult_t ncclRecv(void *to, size_t count, ncclDataType_t type, int peer, ncclComm_t group, cudaStream_t stream) {
  return collective("Recv", count, type, group, stream);
}
