//! House rules that a compiler does not check, over all packages.
//!
//! The tables are decisions: a new unsafe module or long file needs a line here, with the reason.

#![expect(clippy::tests_outside_test_module, reason = "an integration test is a test module")]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod budgets;
mod circles;
mod files;
mod rust;
mod threats;
mod words;

use std::collections::{BTreeMap, BTreeSet};

use files::Package;
use rust::Facts;

const MAX_FUNCTION: usize = 70;
const MAX_FILE: usize = 400;
const MAX_LONG_FILE: usize = 600;

/// Files of up to [`MAX_LONG_FILE`] lines, and why they are not cut.
const LONG_FILES: &[(&str, &str)] = &[];

/// Production modules in which `unsafe` is allowed, and what for. (In tests rustc's `unsafe_code` lint is enough.)
const UNSAFE_MODULES: &[(&str, &str)] = &[
    ("egm-device/src/backing/huge_files.rs", "a child that mounts in a user namespace"),
    ("egm-device/src/broker/peer.rs", "the peer of a socket"),
    ("egm-device/src/mapping.rs", "mmap, mbind and madvise"),
    ("egm-device/src/mapping/private.rs", "mmap of private memory"),
    ("egm-device/src/poison/signal.rs", "a signal handler"),
    ("egm-device/src/sys.rs", "ioctls of EGM devices and KVM, a thread's scheduling class"),
    ("egm-device/src/stream.rs", "streaming stores"),
    ("guest-tests/agent/src/library.rs", "loading a vendor's library in the guest"),
    ("guest-tests/agent/src/ports/x86.rs", "port instructions in the guest"),
    ("guest-tests/agent/src/sys.rs", "system calls and device registers in the guest"),
    ("guest-tests/agent/src/sys/pages.rs", "pages that move, and RDMA memory in the guest"),
    ("guest-tests/vendor/src/cuda/context.rs", "contexts, streams and events of CUDA's driver"),
    ("guest-tests/vendor/src/cuda/device.rs", "what CUDA's driver is asked about GPUs"),
    ("guest-tests/vendor/src/cuda/functions.rs", "symbols of libcuda and their types"),
    ("guest-tests/vendor/src/cuda/kernels.rs", "kernels loaded and launched"),
    ("guest-tests/vendor/src/cuda/memory/host.rs", "memory of CUDA's driver, and ours registered with it"),
    ("guest-tests/vendor/src/cuda/memory/vmm.rs", "memory of CUDA's driver by handles"),
    ("guest-tests/vendor/src/cuda/words.rs", "words that a GPU changes"),
    ("guest-tests/vendor/src/gdr/dma_buf.rs", "mmap of a dma-buf of GPU memory"),
    ("guest-tests/vendor/src/gdr/library.rs", "calls of GDRCopy's library"),
    ("guest-tests/memory/src/c.rs", "calls from C"),
    ("guest-tests/memory/src/mapping.rs", "mmap of BARs in the guest"),
    ("guest-tests/vendor/src/nvshmem/library/mod.rs", "calls of NVSHMEM's library"),
    ("guest-tests/vendor/src/nvshmem/library/pe.rs", "calls of NVSHMEM's library"),
    ("guest-tests/vendor/src/nvshmem/library/collective.rs", "collective calls of NVSHMEM's library"),
    ("guest-tests/vendor/src/verbs/device.rs", "calls of libibverbs about devices"),
    ("guest-tests/vendor/src/verbs/gpu.rs", "GPU memory that an RDMA device writes"),
    ("guest-tests/vendor/src/verbs/library.rs", "functions of libibverbs"),
    ("guest-tests/vendor/src/verbs/memory.rs", "memory that an RDMA device writes"),
    ("guest-tests/vendor/src/verbs/queue.rs", "calls of libibverbs about queues"),
    ("guest-tests/host/src/hosts/physical.rs", "host memory as it lies there"),
    ("vfio/src/kernel/sys.rs", "ioctls of VFIO and iommufd"),
    ("vfio/src/mapping.rs", "mmap of BARs and of a server's memory"),
    ("vfio/src/memory.rs", "the promise that memory shared with devices stays"),
    ("vmm/src/arch/aarch64/gic/read.rs", "attributes of devices, which the kernel writes"),
    ("vmm/src/arch/x86_64/machine_check/ioctls.rs", "ioctls of machine checks"),
    ("vmm/src/arch/x86_64/state/xsave.rs", "areas of extended registers, of the size that KVM reports"),
    ("vmm/src/eventfd.rs", "an eventfd's descriptor"),
    ("vmm/src/inherited.rs", "a descriptor by its number"),
    ("vmm/src/kvm/mod.rs", "a vCPU's page, a VM's descriptor"),
    ("vmm/src/kvm/slots.rs", "memory slots of the guest"),
    ("vmm/src/memory/mod.rs", "our mappings as vm-memory's regions, and shared with devices"),
    ("vmm/src/program.rs", "the program's own pages"),
    ("vmm/src/reexec/holder.rs", "a process that shares memory until the next program runs"),
    ("vmm/src/sandbox/sys.rs", "the report of a refused system call, Landlock for a single thread"),
    ("vmm/src/virtio/blk/io/uring.rs", "pointers that the kernel's ring keeps"),
    ("vmm/src/virtio/iovec.rs", "readv and writev on guest memory"),
    ("vmm/src/virtio/net/tap.rs", "ioctls of a tap"),
    ("vmm/src/virtio/vhost.rs", "guest memory for the kernel's vhost"),
];

/// Where the target's architecture may be asked for, and why.
const ARCH_PATHS: &[(&str, &str)] = &[
    ("vmm/src/arch/", "the modules of an architecture"),
    ("egm-device/src/stream.rs", "streaming stores of x86"),
    ("guest-tests/agent/src/ports.rs", "only x86 has I/O ports"),
];

/// Rows of folders: none needs a later one of its row.
const STEPS: &[&[&str]] = &[
    &["vmm/src/plan/demand/", "vmm/src/plan/map/", "vmm/src/plan/policy/"],
    &["vmm/src/plan/", "vmm/src/reserve/", "vmm/src/resources/", "vmm/src/machine/", "vmm/src/launch/"],
];

/// Files that may plan a machine: the launch, in its loop, and commands that print a plan.
const PLANNERS: [&str; 3] =
    ["vmm/src/cli/check/mod.rs", "vmm/src/cli/plan.rs", "vmm/src/launch/placement.rs"];

/// Top-level folders with packages, from the lowest.
const FLOORS: [&str; 4] = ["vfio", "egm-device", "vmm", "guest-tests"];

/// Our packages and which of ours each may be built on.
const ARROWS: &[(&str, &[&str])] = &[
    ("egm-address", &[]),
    ("egm-config", &["egm-address", "egm-report"]),
    ("egm-device", &["egm-address", "egm-report", "egm-vfio-wire"]),
    ("egm-fixtures", &["egm-vfio-wire"]),
    ("egm-guest", &["egm-address", "egm-memory", "egm-report", "egm-vendor"]),
    ("egm-lab", &["egm-address", "egm-fixtures", "egm-guest", "egm-report"]),
    ("egm-memory", &["egm-address"]),
    ("egm-report", &["egm-address"]),
    ("egm-vendor", &["egm-address", "egm-memory"]),
    ("egm-vfio", &["egm-address", "egm-vfio-wire"]),
    ("egm-vfio-wire", &["egm-address"]),
    ("egm-vmm", &["egm-address", "egm-config", "egm-device", "egm-report", "egm-vfio"]),
];

/// Every Rust file with its facts, and whether all of it is test code.
struct Sources(BTreeMap<String, (Facts, bool)>);

impl Sources {
    fn read(texts: &BTreeMap<String, String>) -> Self {
        let rust = texts.iter().filter(|(path, _)| path.ends_with(".rs"));
        let mut sources: BTreeMap<String, (Facts, bool)> = rust
            .map(|(path, text)| {
                let facts = rust::facts(text).unwrap_or_else(|error| panic!("{path}: {error}"));
                (path.clone(), (facts, files::is_test_path(path)))
            })
            .collect();
        let of_tests = |(path, (facts, _)): (&String, &(Facts, bool))| {
            facts.test_files.iter().flat_map(|name| files::module_files(path, name)).collect::<Vec<_>>()
        };
        for path in sources.iter().flat_map(of_tests).collect::<Vec<_>>() {
            if let Some((_, is_test)) = sources.get_mut(&path) {
                *is_test = true;
            }
        }
        Self(sources)
    }

    fn iter(&self) -> impl Iterator<Item = (&str, &Facts, bool)> {
        self.0.iter().map(|(path, (facts, is_test))| (path.as_str(), facts, *is_test))
    }

    fn production(&self) -> impl Iterator<Item = (&str, &Facts)> {
        self.iter().filter(|(_, _, is_test)| !is_test).map(|(path, facts, _)| (path, facts))
    }

    fn long_functions(&self) -> Vec<String> {
        let long = |(path, facts): (&str, &Facts)| {
            let functions = facts.functions.iter().filter(|(_, _, length)| *length > MAX_FUNCTION);
            functions
                .map(|(name, line, length)| {
                    format!("{path}:{line}: {name} has {length} lines, {MAX_FUNCTION} at most")
                })
                .collect::<Vec<_>>()
        };
        self.production().flat_map(long).collect()
    }

    fn tuple_parameters(&self) -> Vec<String> {
        let wrong = |(path, facts): (&str, &Facts)| {
            let functions = facts.tuple_parameters.iter();
            functions
                .map(|(name, line)| {
                    format!("{path}:{line}: a parameter of {name} is a tuple: name its parts")
                })
                .collect::<Vec<_>>()
        };
        self.production().flat_map(wrong).collect()
    }

    fn long_files(&self, allowed: &[(&str, &str)]) -> Vec<String> {
        let limit =
            |path: &str| if allowed.iter().any(|(p, _)| *p == path) { MAX_LONG_FILE } else { MAX_FILE };
        self.production()
            .filter(|(path, facts)| facts.production_lines > limit(path))
            .map(|(path, facts)| {
                format!("{path} has {} lines, {} at most", facts.production_lines, limit(path))
            })
            .collect()
    }

    fn misplaced_unsafe(&self) -> Vec<String> {
        let opts_in = |path: &String| self.0.get(path).is_some_and(|(facts, _)| facts.is_unsafe_module);
        self.production()
            .filter(|(path, _)| !files::module_chain(path).iter().any(opts_in))
            .flat_map(|(path, facts)| {
                facts
                    .unsafe_lines
                    .iter()
                    .map(move |line| format!("{path}:{line}: unsafe outside an unsafe module"))
            })
            .collect()
    }

    fn misplaced_target_arch(&self) -> Vec<String> {
        self.iter()
            .filter(|(path, _, _)| !ARCH_PATHS.iter().any(|(prefix, _)| path.starts_with(prefix)))
            .flat_map(|(path, facts, _)| {
                facts.target_arch_lines.iter().map(move |line| format!("{path}:{line}: asks for target_arch"))
            })
            .collect()
    }

    /// Literals of production code, by file.
    fn literals(&self) -> BTreeMap<&str, &[String]> {
        self.production().map(|(path, facts)| (path, facts.literals.as_slice())).collect()
    }

    fn sleeping_or_ignored_tests(&self) -> Vec<String> {
        let mut wrong = Vec::new();
        for (path, facts, is_test) in self.iter() {
            let sleeps = facts.sleeps.iter().filter(|(_, in_test)| is_test || *in_test);
            wrong.extend(
                sleeps.map(|(line, _)| format!("{path}:{line}: a test sleeps: wait for what it waits for")),
            );
            let ignored = facts.ignored_lines.iter();
            wrong.extend(ignored.map(|line| format!("{path}:{line}: an ignored test: mend or remove it")));
        }
        wrong
    }
}

fn of_repository() -> Sources {
    Sources::read(&files::texts())
}

#[track_caller]
fn none(wrong: &[String]) {
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}

#[test]
fn functions_have_70_lines_at_most() {
    none(&of_repository().long_functions());
}

/// A tuple as a parameter hides arguments from the limit on their number, and its parts have no names at the call.
#[test]
fn no_parameter_is_a_tuple() {
    none(&of_repository().tuple_parameters());
}

#[test]
fn files_have_400_lines_at_most_or_a_reason_for_600() {
    none(&of_repository().long_files(LONG_FILES));
}

#[test]
fn unsafe_is_in_unsafe_modules_which_the_table_lists() {
    let sources = of_repository();
    none(&sources.misplaced_unsafe());
    let modules: BTreeSet<&str> =
        sources.production().filter(|(_, f)| f.is_unsafe_module).map(|(path, _)| path).collect();
    let table: BTreeSet<&str> = UNSAFE_MODULES.iter().map(|(path, _)| *path).collect();
    assert_eq!(modules, table, "unsafe modules as they are, and as UNSAFE_MODULES in {} has them", file!());
}

#[test]
fn the_security_page_counts_the_unsafe_of_every_module() {
    let (sources, texts) = (of_repository(), files::texts());
    let rows = UNSAFE_MODULES
        .iter()
        .map(|(path, _)| format!("| `{path}` | {} |", sources.0[*path].0.unsafe_lines.len()));
    let missing = rows.filter(|row| !texts["docs/security.md"].contains(row));
    none(&missing.map(|row| format!("docs/security.md has no row {row}")).collect::<Vec<_>>());
}

#[test]
fn every_path_in_the_pages_exists() {
    let texts = files::texts();
    let pages = texts.iter().filter(|(path, _)| *path == "README.md" || path.starts_with("docs/"));
    let quoted = pages.flat_map(|(_, text)| text.split('`').skip(1).step_by(2));
    let paths = quoted.filter_map(|text| text.split_whitespace().next());
    let ours = paths.filter(|path| {
        texts
            .keys()
            .filter_map(|file| file.split_once('/'))
            .any(|(folder, _)| path.starts_with(&format!("{folder}/")))
    });
    let gone = ours.filter(|path| !texts.keys().any(|file| file.starts_with(*path)));
    none(&gone.map(|path| format!("a page names {path}")).collect::<Vec<_>>());
}

/// A name of four words or more in quotes is a test's: a renamed test must not leave a claim without one.
#[test]
fn every_test_that_a_page_names_exists() {
    let texts = files::texts();
    let is_name = |text: &&str| {
        text.matches('_').count() >= 3
            && !text.starts_with("egm_vmm_") // a metric of the API
            && text.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_')
    };
    let pages = texts.iter().filter(|(path, _)| path.starts_with("docs/"));
    let named: BTreeSet<&str> =
        pages.flat_map(|(_, text)| text.split('`').skip(1).step_by(2)).filter(is_name).collect();
    assert!(named.len() >= 20, "{} names", named.len());
    let sources = || texts.iter().filter(|(path, _)| path.ends_with(".rs")).map(|(_, text)| text);
    let gone = named.iter().filter(|name| !sources().any(|text| text.contains(&format!("fn {name}("))));
    none(&gone.map(|name| format!("docs/ names the test {name}, which does not exist")).collect::<Vec<_>>());
}

#[test]
fn every_attack_of_the_security_page_has_a_planted_fault() {
    none(&threats::deviations(&files::texts(), threats::WITHOUT_FAULT));
}

#[test]
fn pages_and_comments_keep_their_budgets() {
    none(&budgets::exceeded(&files::texts()));
}

#[test]
fn excluded_words_become_fewer() {
    let texts = files::texts();
    none(&words::too_many(&texts, &Sources::read(&texts).literals()));
}

#[test]
fn names_of_functions_and_types_have_no_excluded_words() {
    none(&words::in_names(&files::texts()));
}

#[test]
fn only_modules_of_an_architecture_ask_for_it() {
    none(&of_repository().misplaced_target_arch());
}

#[test]
fn no_step_needs_a_later_one() {
    let texts = files::texts();
    let wrong = STEPS.iter().flat_map(|steps| circles::against_steps(steps, &texts));
    none(&wrong.collect::<Vec<_>>());
}

/// After its plan, no phase of a machine makes decisions.
#[test]
fn only_the_launch_and_commands_make_plans() {
    let planners = circles::files_with_path_to("plan::plan", &files::texts());
    assert!(planners.iter().eq(PLANNERS), "{planners:?}");
}

#[test]
fn no_test_sleeps_or_is_ignored() {
    none(&of_repository().sleeping_or_ignored_tests());
}

#[test]
fn packages_are_built_on_those_that_the_design_allows() {
    let packages = files::packages();
    let table: BTreeMap<&str, &[&str]> = ARROWS.iter().copied().collect();
    let names: BTreeSet<_> = packages.iter().map(|package| package.name.as_str()).collect();
    assert_eq!(names, table.keys().copied().collect());
    for Package { name, built_on, .. } in &packages {
        for dependency in built_on {
            assert!(table[name.as_str()].contains(&dependency.as_str()), "{name} is built on {dependency}");
        }
    }
}

/// Dependencies of tests count, too.
#[test]
fn no_package_is_built_on_one_of_a_higher_floor() {
    let packages = files::packages();
    let floor = |name: &str| {
        let folder =
            packages.iter().find(|package| package.name == name).map(|package| package.folder.as_str());
        FLOORS
            .iter()
            .position(|floor| Some(*floor) == folder)
            .unwrap_or_else(|| panic!("{name} has no floor"))
    };
    for Package { name, built_on, tested_with, .. } in &packages {
        for dependency in built_on.union(tested_with) {
            assert!(floor(dependency) <= floor(name), "{name} needs {dependency}, of a higher floor");
        }
    }
}

/// Also in tests, and as a file that is included or opened.
#[test]
fn no_path_leads_to_a_higher_floor() {
    none(&files::paths_upwards(&files::texts(), &FLOORS));
}

#[test]
fn no_files_form_a_circle() {
    none(&circles::differences(&circles::circles(&files::texts()), circles::LEFT));
}

/// Two versions of one of these are two kinds of guest address, or of eventfd and error number.
#[test]
fn there_is_one_version_of_what_rust_vmm_s_packages_share() {
    let texts = files::texts();
    for name in ["vm-memory", "vmm-sys-util", "kvm-ioctls", "vfio-bindings"] {
        let name = format!("name = \"{name}\"");
        let versions = texts["Cargo.lock"].lines().filter(|line| *line == name).count();
        assert_eq!(versions, 1, "{name}: see: cargo tree --duplicates");
    }
}

#[test]
fn every_configuration_states_what_it_is_for() {
    let texts = files::texts();
    let configs: Vec<_> = texts
        .iter()
        .filter(|(p, _)| p.starts_with("configs/") && p.ends_with(".json") && !p.ends_with("schema.json"))
        .collect();
    assert!(configs.len() >= 7, "{}", configs.len());
    for (path, text) in configs {
        let config: serde_json::Value = serde_json::from_str(text).unwrap();
        assert!(config["description"].as_str().is_some_and(|d| d.len() > 20), "{path} has no description");
    }
}

#[test]
fn nothing_is_left_for_later() {
    let texts = files::texts();
    let later = texts.iter().flat_map(|(path, text)| left_for_later(path, text));
    none(&later.collect::<Vec<_>>());
}

/// Lines with one of the words that mark unfinished work.
fn left_for_later(path: &str, text: &str) -> Vec<String> {
    let words = [concat!("TO", "DO"), concat!("FIX", "ME"), concat!("XX", "X")];
    let marked = |line: &str| line.split(|c: char| !c.is_alphanumeric()).any(|word| words.contains(&word));
    let lines = text.lines().zip(1..).filter(|(line, _)| marked(line));
    lines.map(|(_, number)| format!("{path}:{number}: unfinished work: do it, or open an issue")).collect()
}

/// The checks themselves, on small bad trees.
mod tests {
    use super::*;

    fn tree(files: &[(&str, &str)]) -> Sources {
        Sources::read(&files.iter().map(|(path, text)| ((*path).to_owned(), (*text).to_owned())).collect())
    }

    #[test]
    fn a_long_function_is_found_and_its_comments_do_not_count() {
        let function =
            |line: &str, n: usize| format!("impl X {{\n fn f() {{\n{}\n }}\n}}", vec![line; n].join("\n"));
        assert_eq!(
            tree(&[("a.rs", &function("g();", 71))]).long_functions(),
            ["a.rs:2: f has 71 lines, 70 at most"]
        );
        none(&tree(&[("a.rs", &function("g();", 70))]).long_functions());
        none(&tree(&[("a.rs", &function("// g();\n\n", 99))]).long_functions());
        let test = format!("#[cfg(test)]\nmod tests {{ {} }}", function("g();", 71));
        none(&tree(&[("a.rs", &test)]).long_functions());
    }

    #[test]
    fn a_parameter_that_is_a_tuple_is_found_and_data_of_tuples_is_not() {
        for parameter in [
            "(a, b): (u8, u8)",
            "&(a, b): &(u8, u8)",
            "pair: (u8, Vec<u8>)",
            "pair: &'a mut (u8, u8)",
            "x: u8, pair: &(u8, u8),",
        ] {
            let code = format!("impl X {{\n fn f<'a, F: Fn(u8) -> u8>(&self, {parameter}) {{}}\n}}");
            assert_eq!(
                tree(&[("a.rs", &code)]).tuple_parameters(),
                ["a.rs:2: a parameter of f is a tuple: name its parts"]
            );
            none(&tree(&[("a.rs", &format!("#[cfg(test)]\nmod tests {{ {code} }}"))]).tuple_parameters());
        }
        for parameter in [
            "x: &[(u8, u8)]",
            "x: Option<(u8, u8)>",
            "x: impl Fn(u8, u8) -> u8, y: u8",
            "x: BTreeMap<u8, (u8, u8)>",
            "x: (), y: (u8)",
            "[a, b]: [u8; 2]",
        ] {
            none(&tree(&[("a.rs", &format!("fn f({parameter}) -> (u8, u8) {{}}"))]).tuple_parameters());
        }
    }

    #[test]
    fn a_long_file_is_found_and_its_test_module_does_not_count() {
        let code = "use a;\n".repeat(401);
        let wrong = tree(&[("a.rs", &code)]);
        assert_eq!(wrong.long_files(&[]), ["a.rs has 401 lines, 400 at most"]);
        none(&wrong.long_files(&[("a.rs", "reason")]));
        let tests = "use a;\n".repeat(400) + "#[cfg(test)]\npub(crate) mod tests {\n" + &code + "}\n";
        none(&tree(&[("a.rs", &tests)]).long_files(&[]));
        none(
            &tree(&[("x/src/a.rs", "#[cfg(test)]\nmod tests;"), ("x/src/a/tests.rs", &code)]).long_files(&[]),
        );
        assert_eq!(
            tree(&[("x/src/a.rs", "mod tests;"), ("x/src/a/tests.rs", &code)]).long_files(&[]).len(),
            1
        );
    }

    #[test]
    fn unsafe_is_found_in_code_but_not_in_words() {
        let module = "#![expect(unsafe_code, reason = \"mmap\")]\nmod b;";
        for code in [
            "fn f() { unsafe { g() } }",
            "m! { unsafe }",
            "unsafe impl Send for X {}",
            "mod t { unsafe fn f() {} }",
        ] {
            assert_eq!(
                tree(&[("x/src/b.rs", code)]).misplaced_unsafe(),
                ["x/src/b.rs:1: unsafe outside an unsafe module"]
            );
            assert_eq!(tree(&[("x/src/a.rs", module), ("x/src/b.rs", code)]).misplaced_unsafe().len(), 1);
            none(&tree(&[("x/src/a/mod.rs", module), ("x/src/a/b.rs", code)]).misplaced_unsafe());
            none(&tree(&[("x/src/a.rs", module), ("x/src/a/b/c.rs", code)]).misplaced_unsafe());
        }
        none(
            &tree(&[("x/src/b.rs", "//! unsafe\n#![forbid(unsafe_code)]\nconst U: &str = \"unsafe\";")])
                .misplaced_unsafe(),
        );
    }

    #[test]
    fn the_architecture_is_found_wherever_it_is_asked_for() {
        let code = "#[cfg(not(target_arch = \"x86_64\"))]\nfn f() { cfg!(target_arch = \"x86_64\"); }";
        assert_eq!(tree(&[("vmm/src/a.rs", code)]).misplaced_target_arch().len(), 2);
        none(&tree(&[("vmm/src/arch/mod.rs", code)]).misplaced_target_arch());
    }

    #[test]
    fn literals_are_found_outside_tests_and_doc_comments() {
        let code = "/// \"a\"\n#[error(\"b\")]\nfn f() { g!(\"c\") }\n#[cfg(test)]\nmod tests { const D: &str = \"d\"; }";
        assert_eq!(tree(&[("x/src/a.rs", code)]).literals()["x/src/a.rs"], ["\"b\"", "\"c\""]);
        assert!(tree(&[("x/tests/a.rs", code)]).literals().is_empty());
    }

    #[test]
    fn tests_that_sleep_or_are_ignored_are_found() {
        let sleep = "fn f() { std::thread::sleep(d); }";
        none(&tree(&[("x/src/a.rs", sleep)]).sleeping_or_ignored_tests());
        assert_eq!(tree(&[("x/tests/a.rs", sleep)]).sleeping_or_ignored_tests().len(), 1);
        let test = format!("#[cfg(test)]\nmod tests {{ {sleep} }}");
        assert_eq!(tree(&[("x/src/a.rs", &test)]).sleeping_or_ignored_tests().len(), 1);
        let ignored = "#[cfg(test)]\nmod tests {\n #[test]\n #[ignore = \"slow\"]\n fn f() {}\n}";
        assert_eq!(
            tree(&[("x/src/a.rs", ignored)]).sleeping_or_ignored_tests(),
            ["x/src/a.rs:4: an ignored test: mend or remove it"]
        );
    }

    #[test]
    fn a_mark_of_unfinished_work_is_found_as_a_word() {
        assert_eq!(left_for_later("a", concat!("x\n// TO", "DO: y")).len(), 1);
        none(&left_for_later("a", "mktemp XXXXXX"));
    }
}
