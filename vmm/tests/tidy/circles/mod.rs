//! Circles of files: files of which each needs the next, by `use` declarations and paths in code.
//!
//! A file needs the file that defines an item, not one that re-exports it. What a file takes from a module around it
//! does not count, nor does test code. Names that macros generate count as defined by the module that has them.

mod modules;
mod source;

use std::collections::{BTreeMap, BTreeSet};

use modules::Modules;

/// Circles that are not cut yet: a folder, and files below it. A circle leaves this table when it is cut; none may enter
/// or grow.
pub(crate) const LEFT: &[(&str, &str)] = &[];

/// Files with production code that imports `item`, or has a path to it.
pub(crate) fn files_with_path_to(item: &str, texts: &BTreeMap<String, String>) -> BTreeSet<String> {
    Modules::of(texts).with_path_to(item)
}

/// Files in one of the folders `steps` that need a file in a later one.
pub(crate) fn against_steps(steps: &[&str], texts: &BTreeMap<String, String>) -> Vec<String> {
    let modules = Modules::of(texts);
    let step = |file: &str| steps.iter().position(|folder| file.starts_with(*folder));
    let mut wrong = Vec::new();
    for (number, module) in modules.0.iter().enumerate() {
        for other in modules.needed_by(number) {
            let (from, to) = (&module.file, &modules.0[other].file);
            if step(from).zip(step(to)).is_some_and(|(from, to)| from < to) {
                wrong.push(format!("{from} needs {to}, of a later step"));
            }
        }
    }
    wrong
}

/// Circles in `texts`, each with all its files.
pub(crate) fn circles(texts: &BTreeMap<String, String>) -> BTreeSet<BTreeSet<String>> {
    let modules = Modules::of(texts);
    let needs: Vec<BTreeSet<usize>> = (0..modules.0.len()).map(|module| modules.needed_by(module)).collect();
    let reached: Vec<BTreeSet<usize>> = (0..needs.len()).map(|module| reached_from(module, &needs)).collect();
    let circle = |module: usize| {
        let back = reached[module].iter().filter(|other| reached[**other].contains(&module));
        back.map(|other| modules.0[*other].file.clone()).collect::<BTreeSet<String>>()
    };
    (0..needs.len()).map(circle).filter(|circle| !circle.is_empty()).collect()
}

/// Differences between the circles found and those of the table `left`.
pub(crate) fn differences(found: &BTreeSet<BTreeSet<String>>, left: &[(&str, &str)]) -> Vec<String> {
    let of = |(folder, names): &(&str, &str)| -> BTreeSet<String> {
        names.split_whitespace().map(|name| format!("{folder}/{name}")).collect()
    };
    let left: Vec<BTreeSet<String>> = left.iter().map(of).collect();
    let names = |files: Vec<&String>| files.into_iter().map(String::as_str).collect::<Vec<_>>().join(", ");
    let is_new = |circle: &&BTreeSet<String>| !left.iter().any(|known| circle.is_subset(known));
    let new = found.iter().filter(is_new).map(|circle| {
        match left.iter().find(|known| !known.is_disjoint(circle)) {
            Some(known) => {
                format!("a circle of the table has grown by {}", names(circle.difference(known).collect()))
            }
            None => format!("a new circle of files: {}", names(circle.iter().collect())),
        }
    });
    let gone = left.iter().filter_map(|known| {
        let gone: Vec<&String> =
            known.iter().filter(|file| !found.iter().any(|circle| circle.contains(*file))).collect();
        (!gone.is_empty()).then(|| format!("in no circle any more, remove from the table: {}", names(gone)))
    });
    new.chain(gone).collect()
}

fn reached_from(module: usize, needs: &[BTreeSet<usize>]) -> BTreeSet<usize> {
    let mut reached = BTreeSet::new();
    let mut next = vec![module];
    while let Some(module) = next.pop() {
        next.extend(needs[module].iter().filter(|other| reached.insert(**other)));
    }
    reached
}

mod tests {
    use super::*;

    fn found(texts: &[(&str, &str)]) -> Vec<String> {
        let texts = texts.iter().map(|(path, text)| ((*path).to_owned(), (*text).to_owned())).collect();
        circles(&texts).into_iter().map(|circle| Vec::from_iter(circle).join(" ")).collect()
    }

    const ROOT: (&str, &str) = ("x/src/lib.rs", "mod a; mod b; pub use b::B;");

    #[test]
    fn a_circle_is_found_by_imports_paths_and_what_another_file_exports() {
        let b = ("x/src/b.rs", "use super::a::A; pub struct B(A);");
        for a in [
            "use crate::b::B; pub struct A;",
            "use super::{b::{B as Other}}; pub struct A;",
            "use crate::B; pub struct A;",
            "use crate::b; pub struct A; fn f(_: b::B) {}",
            "pub struct A; fn f() { m!(crate::b::B) }",
        ] {
            assert_eq!(found(&[ROOT, ("x/src/a.rs", a), b]), ["x/src/a.rs x/src/b.rs"], "{a}");
        }
    }

    #[test]
    fn tests_exports_and_modules_around_a_file_make_no_circle() {
        let b = ("x/src/b.rs", "use super::a::A; pub struct B(A);");
        for a in [
            "pub struct A; #[cfg(test)] mod tests { use crate::b::B; }",
            "pub struct A; #[cfg(test)] use crate::b::B;",
            "pub struct A; pub use crate::b::B;",
            "pub struct A; // crate::b::B",
        ] {
            assert!(found(&[ROOT, ("x/src/a.rs", a), b]).is_empty(), "{a}");
        }
        let child = [
            ("x/src/lib.rs", "mod a; use a::A; pub struct X;"),
            ("x/src/a.rs", "use super::X; pub struct A;"),
        ];
        assert!(found(&child).is_empty());
    }

    #[test]
    fn an_item_is_found_by_import_and_by_path_outside_of_tests() {
        let with_item = |text: &str| {
            let texts = [ROOT, ("x/src/a.rs", text), ("x/src/b.rs", "pub struct B;")];
            let texts = texts.map(|(path, text)| (path.to_owned(), text.to_owned())).into();
            files_with_path_to("b::B", &texts).contains("x/src/a.rs")
        };
        assert!(with_item("use crate::{b::{B}};") && with_item("fn f(_: crate::b::B) {}"));
        assert!(!with_item("use crate::bb::B;") && !with_item("#[cfg(test)] use crate::b::B;"));
    }

    #[test]
    fn a_step_that_needs_a_later_one_is_found() {
        let texts = [ROOT, ("x/src/a.rs", "use crate::b::B; pub struct A;"), ("x/src/b.rs", "pub struct B;")];
        let texts = texts.map(|(path, text)| (path.to_owned(), text.to_owned())).into();
        let found = against_steps(&["x/src/a", "x/src/b"], &texts);
        assert_eq!(found, ["x/src/a.rs needs x/src/b.rs, of a later step"]);
        assert!(against_steps(&["x/src/b", "x/src/a"], &texts).is_empty());
    }

    #[test]
    fn the_table_only_shrinks() {
        let circle = |names: &[&str]| [names.iter().map(|name| format!("x/{name}")).collect()].into();
        assert!(differences(&circle(&["a", "b"]), &[("x", "a b")]).is_empty());
        assert_eq!(differences(&circle(&["a", "b"]), &[]), ["a new circle of files: x/a, x/b"]);
        assert_eq!(
            differences(&circle(&["a", "b", "c"]), &[("x", "a b")]),
            ["a circle of the table has grown by x/c"]
        );
        let gone = "in no circle any more, remove from the table:";
        assert_eq!(differences(&circle(&["a", "b"]), &[("x", "a b c")]), [format!("{gone} x/c")]);
        assert_eq!(differences(&BTreeSet::new(), &[("x", "a b")]), [format!("{gone} x/a, x/b")]);
    }
}
