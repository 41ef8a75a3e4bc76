#include "events.hpp"

#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>

namespace pdx {

EventQueue::EventQueue() : fd_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    if (fd_ < 0) throw Error(errno, "no descriptor is left for an eventfd");
}

EventQueue::~EventQueue() { ::close(fd_); }

void EventQueue::push(Event event) {
    std::lock_guard lock(mutex_);
    events_.push_back(std::move(event));
    if (events_.size() == 1) eventfd_write(fd_, 1);
}

std::vector<Event> EventQueue::take(size_t max) {
    std::lock_guard lock(mutex_);
    std::vector<Event> taken;
    while (!events_.empty() && taken.size() < max) {
        taken.push_back(std::move(events_.front()));
        events_.pop_front();
    }
    eventfd_t ignored;
    if (events_.empty()) eventfd_read(fd_, &ignored);
    return taken;
}

}  // namespace pdx
