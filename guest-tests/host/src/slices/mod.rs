//! Steps of scenarios about slices and other guest memory.

pub(crate) mod bad_page;
pub(crate) mod broker;
pub(crate) mod device;
pub(crate) mod files;
pub(crate) mod grant;
pub(crate) mod granted;
pub(crate) mod host_words;
pub(crate) mod kernel_tests;
pub(crate) mod own_memory;
pub(crate) mod owned;
pub(crate) mod owners;
pub(crate) mod plugged;
pub(crate) mod ram_pages;
