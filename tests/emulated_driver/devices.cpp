// Devices: which there are, what they report, and how long work lasts on their virtual clocks.
#include "driver.h"

#include <algorithm>
#include <cmath>
#include <utility>

std::vector<Device> devices;

namespace {
thread_local int chosen = 0;
}

Device* device_at(int index) {
    start();
    return index >= 0 && index < settings.visible ? &devices[index] : nullptr;
}

Device& current() {
    static Device none{};  // where the Python half did not load: calls that need a device say so before
    Device* d = device_at(chosen);
    return d ? *d : none;
}

Status set_current(int index) {
    if (!device_at(index)) return INVALID_DEVICE;
    chosen = index;
    return OK;
}

// cudaDeviceAttr and CUdevice_attribute, by number. What our device table does not hold has the value that all of these
// devices share (CUDA C++ Programming Guide, technical specifications per compute capability), or 0.
int attribute(const Device& d, int number) {
    static const std::map<int, int> same = {
        {1, 1024}, {2, 1024}, {3, 1024}, {4, 64}, {5, 2147483647}, {6, 65535}, {7, 65535}, {8, 49152}, {9, 65536}, {10, 32},
        {11, 2147483647}, {14, 512}, {15, 1}, {19, 1}, {31, 1}, {32, 1}, {40, 3}, {41, 1}, {51, 32}, {78, 1}, {79, 1}, {80, 1},
        {83, 1}, {87, 2}, {88, 1}, {89, 1}, {90, 1}, {95, 1}, {111, 1024},
    };
    const Facts& f = d.facts;
    switch (number) {
        case 12: case 82: return f.regs_per_sm;
        case 13: return f.clock_mhz * 1000;
        case 16: return f.sms;
        case 18: return f.integrated;
        case 33: return 0x18 + f.number;
        case 36: return f.memory_clock_khz;
        case 37: return f.memory_bus_bits;
        case 38: return f.l2_bytes;
        case 39: return f.threads_per_sm;
        case 75: return f.cc / 10;
        case 76: return f.cc % 10;
        case 81: return f.smem_per_sm;
        case 97: return f.smem_per_block;
        case 106: return f.blocks_per_sm;
    }
    auto found = same.find(number);
    return found == same.end() ? 0 : found->second;
}

// Whether the clock is low at a moment of device time, and how long it stays as it is then.
static std::pair<bool, double> throttled_at(double us) {
    const double lasts_us = settings.throttle_to_us - settings.throttle_from_us;
    const double since = std::fmod(us - settings.throttle_from_us, settings.throttle_every_us);
    if (std::isnan(since)) return {false, INFINITY};  // it never begins
    if (since < 0) return {false, -since};
    return since < lasts_us ? std::pair{true, lasts_us - since} : std::pair{false, settings.throttle_every_us - since};
}

static bool throttled(const Device& d) { return throttled_at(d.idle_from).first; }

double clock_mhz(const Device& d) { return d.facts.clock_mhz * (throttled(d) ? settings.throttle_factor : 1.0); }

double spins(const Device& d, double clocks) {
    double us = 0;
    while (clocks > 1e-6) {
        auto [low, left_us] = throttled_at(d.idle_from + us);
        const double mhz = d.facts.clock_mhz * (low ? settings.throttle_factor : 1.0);
        const double step_us = std::min(clocks / mhz, left_us + 1e-3);  // past the change, however it was rounded
        us += step_us;
        clocks -= step_us * mhz;
    }
    return us;
}

double lasts(Device& d, double us) {
    if (settings.noise > 0) us *= std::exp(std::normal_distribution<double>(0, settings.noise)(d.random));
    us *= 1 + settings.drift_per_s * d.idle_from * 1e-6;
    if (throttled(d)) us /= settings.throttle_factor;
    if (settings.tail_share > 0 && std::uniform_real_distribution<double>()(d.random) < settings.tail_share)
        us *= settings.tail_factor;
    return std::max(us, 0.0);
}
