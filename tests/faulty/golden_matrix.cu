// Not faulty: tensor-core and matrix instructions with every register of every lane in memory, [lane][register].
extern "C" __global__ void dense(const unsigned* a, const unsigned* b, const float* c, float* d) {
    int l = threadIdx.x;
    float r[4];
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
        : "=f"(r[0]), "=f"(r[1]), "=f"(r[2]), "=f"(r[3])
        : "r"(a[4 * l]), "r"(a[4 * l + 1]), "r"(a[4 * l + 2]), "r"(a[4 * l + 3]), "r"(b[2 * l]), "r"(b[2 * l + 1]),
          "f"(c[4 * l]), "f"(c[4 * l + 1]), "f"(c[4 * l + 2]), "f"(c[4 * l + 3]));
    for (int i = 0; i < 4; i++) d[4 * l + i] = r[i];
}

extern "C" __global__ void dense_half(const unsigned* a, const unsigned* b, const unsigned* c, unsigned* d) {
    int l = threadIdx.x;
    unsigned r[2];
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%0,%1}, {%2,%3,%4,%5}, {%6,%7}, {%8,%9};"
        : "=r"(r[0]), "=r"(r[1])
        : "r"(a[4 * l]), "r"(a[4 * l + 1]), "r"(a[4 * l + 2]), "r"(a[4 * l + 3]), "r"(b[2 * l]), "r"(b[2 * l + 1]), "r"(c[2 * l]), "r"(c[2 * l + 1]));
    d[2 * l] = r[0], d[2 * l + 1] = r[1];
}

#define SPARSE(NAME, SELECTOR) \
extern "C" __global__ void NAME(const unsigned* a, const unsigned* b, const float* c, const unsigned* e, float* d) { \
    int l = threadIdx.x; \
    float r[4]; \
    asm volatile("mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, " \
        "{%8,%9,%10,%11}, {%12,%13,%14,%15}, %16, " SELECTOR ";" \
        : "=f"(r[0]), "=f"(r[1]), "=f"(r[2]), "=f"(r[3]) \
        : "r"(a[4 * l]), "r"(a[4 * l + 1]), "r"(a[4 * l + 2]), "r"(a[4 * l + 3]), \
          "r"(b[4 * l]), "r"(b[4 * l + 1]), "r"(b[4 * l + 2]), "r"(b[4 * l + 3]), \
          "f"(c[4 * l]), "f"(c[4 * l + 1]), "f"(c[4 * l + 2]), "f"(c[4 * l + 3]), "r"(e[l])); \
    for (int i = 0; i < 4; i++) d[4 * l + i] = r[i]; \
}
SPARSE(sparse_0, "0x0")
SPARSE(sparse_1, "0x1")

// rows[lane] are byte offsets into the 4 KB copied to shared memory
extern "C" __global__ void matrices(const uint4* x, const unsigned* rows, unsigned* out) {
    __shared__ uint4 tile[256];
    for (int i = 0; i < 8; i++) tile[threadIdx.x + 32 * i] = x[threadIdx.x + 32 * i];
    __syncwarp();
    unsigned at = (unsigned)__cvta_generic_to_shared(tile) + rows[threadIdx.x], r[4], t[4], m;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at));
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];" : "=r"(t[0]), "=r"(t[1]) : "r"(at));
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(m) : "r"(r[0]));
    for (int i = 0; i < 4; i++) out[32 * i + threadIdx.x] = r[i];
    out[128 + threadIdx.x] = t[0], out[160 + threadIdx.x] = t[1], out[192 + threadIdx.x] = m;
}
