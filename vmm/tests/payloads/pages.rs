//! Host pages behind guest memory, in machines that run.

use serde_json::json;

use crate::pool::Pool;
use crate::{assert_ok, kvm, programs, run_in};

/// Runs a machine whose RAM is `size` of hugetlb pages, and looks at every edge of it.
fn starts_with_hugetlb(size: &str, page: &str) {
    let config = json!({ "memory": { "size": size, "page_size": page }, "console": "stdio" });
    let ended = run_in(config, |_| (), programs::memory);
    assert_ok(&ended);
}

#[test]
fn a_machine_starts_with_hugetlb_pages_of_2_mib_as_its_ram() {
    if kvm()
        && let Some(_pool) = Pool::reserve(8, 2 << 10)
    {
        starts_with_hugetlb("16MiB", "2M");
    }
}

#[test]
fn a_machine_starts_with_a_hugetlb_page_of_1_gib_as_its_ram() {
    if kvm()
        && let Some(_pool) = Pool::reserve(1, 1 << 20)
    {
        starts_with_hugetlb("1GiB", "1G");
    }
}
