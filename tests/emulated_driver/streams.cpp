// Streams and events: work waits in order, and runs when the host waits for it.
//
// The legacy stream and blocking ones wait for each other, non-blocking ones for nobody, events order any two. A wait of the
// host runs what it waits for and what that depends on, and nothing else: whatever else is queued has not happened yet.
#include "driver.h"

#include <algorithm>

namespace {
std::set<Event*> events;
thread_local int inside = 0;
thread_local int trying = 0;

// While one lives, work runs as far as it can: behind a kernel that hangs it stays queued, and the host goes on.
struct Trying {
    Trying() { trying++; }
    ~Trying() { trying--; }
};

thread_local std::map<int, StreamPtr> per_thread;

Status run_one(Stream& s, Work& work) {
    Device& d = *s.device;
    double us = 0;
    Status status = OK;
    if (!d.sticky && !ending()) {
        trace("run %s on stream %p of device %d", work.what, static_cast<void*>(&s), d.index);
        inside++;
        status = work.run(s, us);
        inside--;
    }
    if (status == HANGS) return trying ? HANGS : (hang(), HANGS);
    if (status) d.sticky = status;
    s.now += us;
    d.idle_from = std::max(d.idle_from, s.now);
    if (!inside) release_deferred();
    return status;
}
}  // namespace

bool running() { return inside > 0; }

StreamPtr find(void* handle) {
    auto number = reinterpret_cast<uintptr_t>(handle);
    Device& d = current();
    if (number <= 1) return d.legacy;
    if (number == 2) {  // cudaStreamPerThread
        StreamPtr& own = per_thread[d.index];
        if (!own) own = new_stream(0, 0);
        return own;
    }
    for (auto& device : devices)
        for (auto& s : device.streams)
            if (s.get() == handle) return s->alive ? s : nullptr;
    return nullptr;
}

StreamPtr new_stream(unsigned flags, int priority) {
    auto s = std::make_shared<Stream>();
    Device& d = current();
    s->device = &d;
    s->flags = flags;
    s->priority = priority;
    s->now = d.idle_from;
    d.streams.push_back(s);
    return s;
}

Status destroy(const StreamPtr& s) {
    if (!s || s == s->device->legacy) return INVALID_HANDLE;
    s->alive = false;  // what is queued still runs
    return OK;
}

Status drain(Stream& s, uint64_t count) {
    while (s.done < count) {
        if (s.running) {
            if (s.runner == std::this_thread::get_id()) return s.device->sticky;  // called from inside its own work
            if (trying) return HANGS;
            hang();  // waits for a kernel that never ends
        }
        s.running = true;
        s.runner = std::this_thread::get_id();
        for (auto& [other, upto] : s.queue.front().after) {
            if (drain(*other, upto) == HANGS) {
                s.running = false;
                return HANGS;
            }
            s.now = std::max(s.now, other->now);
        }
        Work work = std::move(s.queue.front());
        s.queue.pop_front();
        if (run_one(s, work) == HANGS) {
            s.runner = std::thread::id();  // and runs for ever
            return HANGS;
        }
        s.done++;
        s.running = false;
    }
    return s.device->sticky;
}

Status drain(Device& d) {
    if (d.legacy) drain(*d.legacy, d.legacy->submitted);
    auto all = d.streams;
    for (auto& s : all) drain(*s, s->submitted);
    auto& list = d.streams;
    list.erase(std::remove_if(list.begin(), list.end(), [](auto& s) { return !s->alive && s->done == s->submitted; }), list.end());
    return d.sticky;
}

Status submit(const StreamPtr& s, const char* what, Run run, std::vector<Position> after) {
    if (!s) return refuse(INVALID_HANDLE, "%s: no such stream", what);
    Device& d = *s->device;
    if (d.sticky) return d.sticky;
    trace("queue %s on stream %p%s", what, static_cast<void*>(s.get()), s->capture ? " (captured)" : "");
    if (s->capture) {
        captured(s, what, std::move(run));
        return OK;
    }
    if (Status r = refused_in_capture(s, what)) return r;
    after.insert(after.end(), s->waits.begin(), s->waits.end());
    s->waits.clear();
    if (s == d.legacy) {
        for (auto& other : d.streams)
            if (!(other->flags & 1)) after.push_back({other, other->submitted});
    } else if (!(s->flags & 1)) {
        after.push_back({d.legacy, d.legacy->submitted});
    }
    s->queue.push_back({what, std::move(run), std::move(after)});
    s->submitted++;
    if (settings.eager) {
        Trying now;
        drain(*s, s->submitted);  // what fails is told by the next call, as by a GPU that is faster than the host
    }
    return OK;
}

Status wait(const StreamPtr& s, const char* what) {
    if (!s) return refuse(INVALID_HANDLE, "%s: no such stream", what);
    if (Status r = refused_in_capture(s, what)) return r;
    if (s == s->device->legacy) {
        auto all = s->device->streams;
        for (auto& other : all)
            if (!(other->flags & 1)) drain(*other, other->submitted);
    }
    return drain(*s, s->submitted);
}

Status query(const StreamPtr& s, uint64_t count) {
    if (s->device->sticky) return s->device->sticky;
    if (s->done >= count) return OK;
    if (s->running) return NOT_READY;
    Trying once;
    drain(*s, s->done + 1);  // time passes while the host polls
    return s->device->sticky ? s->device->sticky : s->done >= count ? OK : NOT_READY;
}

// ---- events
Event* new_event(unsigned flags) {
    auto e = new Event{flags, nullptr};
    events.insert(e);
    return e;
}

Status destroy(Event* e) {
    if (!events.erase(e)) return refuse(INVALID_HANDLE, "destroy of what is no event");
    delete e;  // what waits for its record keeps the record
    return OK;
}

Status record(Event* e, const StreamPtr& s) {
    if (!events.count(e) || !s) return refuse(INVALID_HANDLE, "event record: no such event or stream");
    auto r = std::make_shared<Record>();
    if (s->capture) {
        r->captured = true;
        r->capture = s->capture;
        r->frontier = s->frontier;
        e->record = r;
        return s->device->sticky;
    }
    auto mark = [r](Stream& on, double&) { return r->us = on.now, OK; };
    if (Status status = submit(s, "event record", mark)) return status;
    r->at = {s, s->submitted};
    e->record = r;
    return OK;
}

Status wait_event(const StreamPtr& s, Event* e) {
    if (!events.count(e) || !s) return refuse(INVALID_HANDLE, "stream wait: no such event or stream");
    if (!e->record) return s->device->sticky;
    if (e->record->captured) return join(s, *e->record);
    if (s->capture) {
        s->capture->broken = CAPTURE_ISOLATION;
        return refuse(CAPTURE_ISOLATION, "a capturing stream waits for an event recorded outside of its capture");
    }
    s->waits.push_back(e->record->at);
    return s->device->sticky;
}

static Status of_capture(Event* e, const char* what) {
    if (!e->record || !e->record->captured) return OK;
    if (auto capture = e->record->capture.lock()) capture->broken = CAPTURED_EVENT;
    return refuse(CAPTURED_EVENT, "%s of an event that was recorded in a capture", what);
}

Status synchronize(Event* e) {
    if (!events.count(e)) return refuse(INVALID_HANDLE, "event synchronize: no such event");
    if (Status r = of_capture(e, "synchronize")) return r;
    if (!e->record) return current().sticky;
    return drain(*e->record->at.stream, e->record->at.count);
}

Status query(Event* e) {
    if (!events.count(e)) return refuse(INVALID_HANDLE, "event query: no such event");
    if (Status r = of_capture(e, "query")) return r;
    return e->record ? query(e->record->at.stream, e->record->at.count) : current().sticky;
}

Status elapsed(float* ms, Event* a, Event* b) {
    for (auto e : {a, b}) {
        if (!events.count(e) || !e->record || e->record->captured || (e->flags & 2))  // cudaEventDisableTiming
            return refuse(INVALID_HANDLE, "elapsed time of events that are not recorded, or without timing");
        if (Status sticky = e->record->at.stream->device->sticky) return sticky;
        if (e->record->at.stream->done < e->record->at.count) return NOT_READY;
    }
    if (a->record->at.stream->device != b->record->at.stream->device)
        return refuse(INVALID_HANDLE, "elapsed time between events of two devices");
    *ms = static_cast<float>((b->record->us - a->record->us) / 1e3);
    return OK;
}
