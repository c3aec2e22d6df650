// Stream capture and graphs. A graph is replayed node by node in the order in which it was recorded.
#include "driver.h"

#include <algorithm>

namespace {
std::vector<std::shared_ptr<Capture>> captures;  // those under way

Status break_it(Capture& c, Status code) {
    c.broken = code;
    return code;
}
}  // namespace

Status begin_capture(const StreamPtr& s, int mode) {
    if (!s) return refuse(INVALID_HANDLE, "begin capture: no such stream");
    if (s == s->device->legacy) return refuse(CAPTURE_UNSUPPORTED, "capture of the legacy stream");
    if (s->capture) return refuse(INVALID_VALUE, "begin capture: the stream is capturing already");
    auto c = std::make_shared<Capture>();
    c->graph = std::make_unique<Graph>();
    c->origin = s;
    c->mode = mode;
    c->thread = std::this_thread::get_id();
    c->members = {s};
    s->capture = c;
    s->frontier.clear();
    captures.push_back(c);
    return s->device->sticky;
}

static bool all_joined(const Graph& g, const std::set<int>& ends) {
    std::set<int> seen;
    std::vector<int> open(ends.begin(), ends.end());
    while (!open.empty()) {
        int n = open.back();
        open.pop_back();
        if (seen.insert(n).second) open.insert(open.end(), g.nodes[n].after.begin(), g.nodes[n].after.end());
    }
    return seen.size() == g.nodes.size();
}

Status end_capture(const StreamPtr& s, Graph** out) {
    *out = nullptr;
    if (!s || !s->capture) return refuse(INVALID_VALUE, "end capture: the stream is not capturing");
    auto c = s->capture;
    if (c->origin != s) return refuse(INVALID_VALUE, "end capture: on another stream than the capture began on");
    if (c->mode != RELAXED && c->thread != std::this_thread::get_id())
        return refuse(CAPTURE_WRONG_THREAD, "end capture: in another thread than the capture began in");
    bool joined = all_joined(*c->graph, s->frontier);
    for (auto& member : c->members) member->capture.reset();
    captures.erase(std::remove(captures.begin(), captures.end(), c), captures.end());
    if (c->broken) return refuse(CAPTURE_INVALIDATED, "end capture: it was invalidated before by error %d", c->broken);
    if (!joined) return refuse(CAPTURE_UNJOINED, "end capture: a forked stream was not joined to the first one");
    *out = c->graph.release();
    return OK;
}

Status capture_status(const StreamPtr& s, int* out) {
    if (!s) return refuse(INVALID_HANDLE, "is capturing: no such stream");
    if (s == s->device->legacy)
        if (Status r = refused_in_capture(s, "is capturing")) return r;
    *out = !s->capture ? 0 : s->capture->broken ? 2 : 1;
    return OK;
}

void captured(const StreamPtr& s, const char* what, Run run) {
    auto& nodes = s->capture->graph->nodes;
    nodes.push_back({{what, std::move(run), {}}, s->frontier});
    s->frontier = {static_cast<int>(nodes.size()) - 1};
}

Status join(const StreamPtr& s, const Record& r) {
    auto c = r.capture.lock();
    if (!c || std::find(captures.begin(), captures.end(), c) == captures.end())
        return refuse(CAPTURED_EVENT, "stream wait for an event that was recorded in a capture that is over");
    if (s->capture && s->capture != c) {
        break_it(*s->capture, CAPTURE_MERGE);
        return refuse(break_it(*c, CAPTURE_MERGE), "stream wait would merge two captures");
    }
    if (!s->capture) {
        if (s == s->device->legacy) return refuse(break_it(*c, CAPTURE_IMPLICIT), "the legacy stream cannot join a capture");
        s->capture = c;
        s->frontier.clear();
        c->members.push_back(s);
    }
    s->frontier.insert(r.frontier.begin(), r.frontier.end());
    return OK;
}

Status replay(Graph* g, const StreamPtr& s) {
    if (!g || !s) return refuse(INVALID_HANDLE, "graph launch: no such graph or stream");
    auto nodes = std::make_shared<std::vector<Node>>(g->nodes);
    std::vector<Position> after;
    if (g->last.stream) after.push_back(g->last);  // launches of one executable graph do not overlap
    auto run = [nodes](Stream& on, double& us) {
        us = 1;
        for (auto& node : *nodes) {
            double own = 0;
            if (Status r = node.work.run(on, own)) return r;
            us += own;
        }
        return OK;
    };
    if (Status r = submit(s, "graph", run, after)) return r;
    if (!s->capture) g->last = {s, s->submitted};
    return OK;
}

// ---- what a capture forbids
Status refused_in_capture(const StreamPtr& s, const char* what) {
    if (s->capture) return refuse(break_it(*s->capture, CAPTURE_UNSUPPORTED), "%s on a stream that is capturing", what);
    if (s != s->device->legacy) return OK;
    for (auto& c : captures)
        for (auto& member : c->members)
            if (member->device == s->device && !(member->flags & 1))
                return refuse(break_it(*c, CAPTURE_IMPLICIT), "%s on the legacy stream while a blocking stream captures", what);
    return OK;
}

Status refused_on_device(Device& d, const char* what) {
    for (auto& c : captures)
        for (auto& member : c->members)
            if (member->device == &d)
                return refuse(break_it(*c, CAPTURE_UNSUPPORTED), "%s while a stream of the device is capturing", what);
    return OK;
}

Status refused_unsafe(const char* what) {
    for (auto& c : captures)
        if (c->mode == GLOBAL || (c->mode == THREAD_LOCAL && c->thread == std::this_thread::get_id()))
            return refuse(break_it(*c, CAPTURE_UNSUPPORTED), "%s while a stream is capturing, and not in relaxed mode", what);
    return OK;
}
