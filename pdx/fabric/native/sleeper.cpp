#include "sleeper.hpp"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>

#include "common.hpp"

namespace pdx {

Sleeper::Sleeper(const std::vector<int>& cq_fds)
    : command_fd_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)), wakeups_fd_(epoll_create1(EPOLL_CLOEXEC)) {
    waited_ = {{command_fd_, POLLIN, 0}, {wakeups_fd_, POLLIN, 0}};
    for (const int fd : cq_fds) waited_.push_back({fd, POLLIN, 0});
    if (command_fd_ >= 0 && wakeups_fd_ >= 0) return;
    const int code = errno;
    if (command_fd_ >= 0) ::close(command_fd_);
    if (wakeups_fd_ >= 0) ::close(wakeups_fd_);
    throw Error(code, "no descriptor is left for the worker's wake-ups");
}

Sleeper::~Sleeper() {
    for (const auto& [fd, duplicate] : duplicates_) ::close(duplicate);
    ::close(command_fd_);
    ::close(wakeups_fd_);
}

void Sleeper::add_wakeup(int fd) {
    const int duplicate = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    if (duplicate < 0) throw Error(errno, "descriptor " + std::to_string(fd) + " cannot be duplicated");
    epoll_event event{};
    event.events = EPOLLIN | EPOLLET;
    if (epoll_ctl(wakeups_fd_, EPOLL_CTL_ADD, duplicate, &event) != 0) {
        const int code = errno;
        ::close(duplicate);
        throw Error(code, "descriptor " + std::to_string(fd) + " cannot be waited for");
    }
    std::lock_guard lock(mutex_);
    duplicates_.emplace(fd, duplicate);
    num_wakeups_++;
}

void Sleeper::remove_wakeup(int fd) {
    std::lock_guard lock(mutex_);
    const auto found = duplicates_.find(fd);
    if (found == duplicates_.end()) {
        throw Error(ENOENT, "descriptor " + std::to_string(fd) + " was not added as a wake-up");
    }
    epoll_ctl(wakeups_fd_, EPOLL_CTL_DEL, found->second, nullptr);
    ::close(found->second);
    duplicates_.erase(found);
    num_wakeups_--;
}

void Sleeper::kick() {
    if (asleep_.exchange(false, std::memory_order_seq_cst)) eventfd_write(command_fd_, 1);
}

void Sleeper::sleep(int64_t timeout_ns, bool on_wakeups) {
    waited_[1].fd = on_wakeups ? wakeups_fd_ : -1;
    const timespec timeout{timeout_ns / 1'000'000'000, timeout_ns % 1'000'000'000};
    const int count = ppoll(waited_.data(), waited_.size(), &timeout, nullptr);
    call_off();
    if (count <= 0) return;
    eventfd_t ignored;
    if (waited_[0].revents) eventfd_read(command_fd_, &ignored);
    epoll_event edges[16];
    if (waited_[1].revents) epoll_wait(wakeups_fd_, edges, 16, 0);
}

}  // namespace pdx
