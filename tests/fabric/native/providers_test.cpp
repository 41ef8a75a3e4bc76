// The rules of providers whose devices are not here, against what libfabric offers for such devices. Offers are written
// down from what the providers' sources and fi_info print: efa 2.4 on a p5 instance, verbs;ofi_rxm 2.1 on ConnectX-7.
//
//   providers_test LIBFABRIC    prints each check that fails
#include <cstring>
#include <iostream>

#include "../../../pdx/fabric/native/libfabric.hpp"
#include "../../../pdx/fabric/native/newer.hpp"
#include "../../../pdx/fabric/native/providers/provider.hpp"

using namespace pdx;

namespace {

int num_failed = 0;

void check(bool holds, const char* what, int line) {
    if (holds) return;
    num_failed++;
    std::cout << "line " << line << ": " << what << "\n";
}
#define CHECK(condition) check(condition, #condition, __LINE__)

constexpr int kDeviceKeys = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;

struct Offer {
    const char* provider;
    const char* fabric;
    uint64_t mode = 0;
    int mr_mode = kDeviceKeys;
    uint64_t caps = FI_MSG | FI_RMA | FI_HMEM;
    size_t cq_data_size = 4;
    size_t iov_limit = 4, rma_iov_limit = 4;
    size_t max_msg_size = SIZE_MAX;
    fi_ep_type type = FI_EP_RDM;
};

const Offer kEfa{.provider = "efa", .fabric = "efa", .iov_limit = 4, .rma_iov_limit = 1};
const Offer kEfaDirect{.provider = "efa", .fabric = "efa-direct", .mode = FI_CONTEXT2, .iov_limit = 1,
                       .rma_iov_limit = 1, .max_msg_size = 8760};
const Offer kVerbs{.provider = "verbs;ofi_rxm", .fabric = "IB-0xfe80000000000000", .max_msg_size = 1 << 30};

fi_info* make(const Offer& offer, fi_info* next = nullptr) {
    fi_info* info = libfabric().dupinfo(nullptr);
    info->next = next;
    info->caps = offer.caps;
    info->mode = offer.mode;
    info->ep_attr->type = offer.type;
    info->ep_attr->max_msg_size = offer.max_msg_size;
    info->fabric_attr->prov_name = strdup(offer.provider);
    info->fabric_attr->name = strdup(offer.fabric);
    info->domain_attr->mr_mode = offer.mr_mode;
    info->domain_attr->cq_data_size = offer.cq_data_size;
    info->tx_attr->iov_limit = offer.iov_limit;
    info->tx_attr->rma_iov_limit = offer.rma_iov_limit;
    return info;
}

std::string chosen(const ProviderRules& rules, const char* name, const Offer& first, const Offer& second,
                   std::string& reasons) {
    fi_info* offers = make(first, make(second));
    const fi_info* best = choose(rules, name, offers, reasons);
    const std::string fabric = best ? best->fabric_attr->name : "";
    libfabric().freeinfo(offers);
    return fabric;
}

std::string why_not(const ProviderRules& rules, const Offer& offer) {
    fi_info* info = make(offer);
    const std::string reason = refusal(rules, *info);
    libfabric().freeinfo(info);
    return reason;
}

template <typename Change>
Offer with(Offer offer, Change change) {
    change(offer);
    return offer;
}

void test_efa_prefers_the_fabric_that_knows_unknown_writers() {
    std::string reasons;
    CHECK(chosen(efa_rules(), "efa", kEfaDirect, kEfa, reasons) == "efa");
    CHECK(chosen(efa_rules(), "efa", kEfa, kEfaDirect, reasons) == "efa");
    CHECK(chosen(efa_rules(), "efa", kEfaDirect, kEfaDirect, reasons) == "efa-direct");
    CHECK(reasons.empty());
}

void test_what_cannot_carry_immediates_is_refused_with_the_reason() {
    std::string reasons;
    const Offer none = with(kEfa, [](Offer& o) { o.cq_data_size = 0; });
    const Offer plain = with(kEfaDirect, [](Offer& o) { o.caps = FI_MSG; });
    CHECK(chosen(efa_rules(), "efa", none, plain, reasons).empty());
    CHECK(reasons == "a write carries 0 bytes of immediate, not 4; it has no remote writes");
    CHECK(!why_not(efa_rules(), with(kEfa, [](Offer& o) { o.type = FI_EP_DGRAM; })).empty());
}

void test_modes_that_are_not_served_are_refused() {
    CHECK(!why_not(efa_rules(), with(kEfaDirect, [](Offer& o) { o.mode |= FI_MSG_PREFIX; })).empty());
    CHECK(!why_not(verbs_rules(), with(kVerbs, [](Offer& o) { o.mr_mode |= FI_MR_ENDPOINT; })).empty());
    CHECK(!why_not(verbs_rules(), with(kVerbs, [](Offer& o) { o.mr_mode &= ~FI_MR_PROV_KEY; })).empty());
    CHECK(why_not(verbs_rules(), kVerbs).empty());
}

void test_other_providers_of_the_same_answer_are_passed_over() {
    std::string reasons;
    const Offer plain = with(kVerbs, [](Offer& o) { o.provider = "verbs", o.fabric = "plain"; });
    CHECK(chosen(verbs_rules(), "verbs;ofi_rxm", plain, kVerbs, reasons) == kVerbs.fabric);
}

void test_hints_of_efa() {
    fi_info* hints = make_hints(efa_rules(), "efa", "rdmap79s0-rdm", true);
    CHECK(hints->caps == (FI_MSG | FI_RMA | FI_HMEM));
    CHECK(hints->mode & FI_CONTEXT2);  // else libfabric does not offer efa-direct
    CHECK(hints->domain_attr->mr_mode == (kDeviceKeys | FI_MR_HMEM));
    CHECK(!std::strcmp(hints->domain_attr->name, "rdmap79s0-rdm"));
    CHECK(hints->tx_attr->msg_order == FI_ORDER_NONE && hints->rx_attr->msg_order == FI_ORDER_NONE);
    libfabric().freeinfo(hints);
    hints = make_hints(efa_rules(), "efa", "", false);
    CHECK(!hints->domain_attr->name);
    CHECK(!(hints->caps & FI_HMEM) && !(hints->domain_attr->mr_mode & FI_MR_HMEM));
    libfabric().freeinfo(hints);
}

void test_options_of_efa() {
    const auto& options = efa_rules().options;
    CHECK(options.size() == 2);
    // cuMem's memory has no attribute that the provider would set; asked for only where there is such memory.
    CHECK(options[0].name == kOptCudaApiPermitted && !options[0].value && options[0].device_memory);
    CHECK(options[1].name == kOptSharedMemoryPermitted && !options[1].value && !options[1].device_memory);
    const auto& required = efa_rules().required;
    CHECK(required.size() == 1 && required[0].name == kOptEfaEmulatedWrite && !required[0].value);
    CHECK(efa_rules().shared_endpoint && !efa_rules().injects);
}

void test_hints_of_verbs_and_tcp_follow_the_address() {
    for (const auto* rules : {&verbs_rules(), &tcp_rules()}) {
        fi_info* four = make_hints(*rules, rules->names[0], "10.0.0.1", false);
        fi_info* six = make_hints(*rules, rules->names[0], "fd00::1", false);
        CHECK(four->addr_format == FI_SOCKADDR_IN && six->addr_format == FI_SOCKADDR_IN6);
        CHECK(four->tx_attr->msg_order == FI_ORDER_NONE);
        libfabric().freeinfo(four);
        libfabric().freeinfo(six);
    }
}

void test_two_registrations_of_one_range_are_two() {
    CHECK(!std::strcmp(getenv("FI_MR_CACHE_MAX_COUNT"), "0"));
}

}  // namespace

int main(int argc, char** argv) {
    load_libfabric({argv + 1, argv + argc});
    test_efa_prefers_the_fabric_that_knows_unknown_writers();
    test_what_cannot_carry_immediates_is_refused_with_the_reason();
    test_modes_that_are_not_served_are_refused();
    test_other_providers_of_the_same_answer_are_passed_over();
    test_hints_of_efa();
    test_options_of_efa();
    test_hints_of_verbs_and_tcp_follow_the_address();
    test_two_registrations_of_one_range_are_two();
    return num_failed != 0;
}
