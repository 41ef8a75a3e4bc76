#include "port_sockets.hpp"

#include <dirent.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>

namespace pdx {
namespace {

constexpr char kDescriptors[] = "/proc/self/fd";

// The same port of the same address, or of any where the listener takes all.
bool is_on(const sockaddr_storage& local, const sockaddr_storage& listener) {
    if (local.ss_family != listener.ss_family) return false;
    if (local.ss_family == AF_INET) {
        const auto& a = reinterpret_cast<const sockaddr_in&>(local);
        const auto& b = reinterpret_cast<const sockaddr_in&>(listener);
        return a.sin_port == b.sin_port &&
               (b.sin_addr.s_addr == htonl(INADDR_ANY) || a.sin_addr.s_addr == b.sin_addr.s_addr);
    }
    if (local.ss_family != AF_INET6) return false;
    const auto& a = reinterpret_cast<const sockaddr_in6&>(local);
    const auto& b = reinterpret_cast<const sockaddr_in6&>(listener);
    return a.sin6_port == b.sin6_port && (IN6_IS_ADDR_UNSPECIFIED(&b.sin6_addr) ||
                                          std::memcmp(&a.sin6_addr, &b.sin6_addr, sizeof a.sin6_addr) == 0);
}

bool is_socket(const char* number) {
    char target[8];
    const ssize_t size = readlink((std::string(kDescriptors) + "/" + number).c_str(), target, sizeof target);
    return size >= 7 && std::memcmp(target, "socket:", 7) == 0;
}

int option(int fd, int name) {
    int value = -1;
    socklen_t size = sizeof value;
    return getsockopt(fd, SOL_SOCKET, name, &value, &size) == 0 ? value : -1;
}

// True if it was a connection. The descriptor is a copy: the number may be another file's by now, a copy stays its.
bool shut(int copy, const sockaddr_storage& listener) {
    sockaddr_storage local{};
    socklen_t size = sizeof local;
    if (getsockname(copy, reinterpret_cast<sockaddr*>(&local), &size) || !is_on(local, listener)) return false;
    if (option(copy, SO_TYPE) != SOCK_STREAM) return false;
    const bool accepted = option(copy, SO_ACCEPTCONN) == 0;
    shutdown(copy, SHUT_RDWR);
    return accepted;
}

}  // namespace

size_t shut_port(const std::vector<char>& name) {
    sockaddr_storage listener{};
    std::memcpy(&listener, name.data(), std::min(name.size(), sizeof listener));
    const std::unique_ptr<DIR, int (*)(DIR*)> folder(opendir(kDescriptors), closedir);
    if (!folder) return 0;
    size_t accepted = 0;
    while (const dirent* entry = readdir(folder.get())) {
        if (!is_socket(entry->d_name)) continue;
        const int copy = fcntl(std::atoi(entry->d_name), F_DUPFD_CLOEXEC, 0);
        if (copy < 0) continue;
        accepted += shut(copy, listener);
        close(copy);
    }
    return accepted;
}

}  // namespace pdx
