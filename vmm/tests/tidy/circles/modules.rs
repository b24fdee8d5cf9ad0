//! Modules of the packages, and which of them each needs.

use std::collections::{BTreeMap, BTreeSet};
use std::str::FromStr;

use proc_macro2::TokenStream;

use super::source::{Import, Source};
use crate::files;

/// Longest chain of re-exports that is followed.
const MOST_STEPS: usize = 12;

/// The module in one file.
#[derive(Default)]
pub(super) struct Module {
    pub(super) file: String,
    /// The module around it.
    above: Option<usize>,
    children: BTreeMap<String, usize>,
    source: Source,
}

/// Meaning of a path.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
enum Target {
    Module(usize),
    /// An item, by the module that defines it.
    ItemOf(usize),
}

/// All modules of all packages; those of one package never name those of another by themselves.
pub(super) struct Modules(pub(super) Vec<Module>);

impl Modules {
    pub(super) fn of(texts: &BTreeMap<String, String>) -> Self {
        let mut modules = Self(Vec::new());
        let is_root = |path: &&String| path.ends_with("src/lib.rs") || path.ends_with("src/main.rs");
        for root in texts.keys().filter(is_root).filter(|path| !files::is_test_path(path)) {
            modules.load(texts, root, None);
        }
        modules
    }

    fn load(&mut self, texts: &BTreeMap<String, String>, file: &str, above: Option<usize>) -> usize {
        let mut source = Source::default();
        source.read(TokenStream::from_str(&texts[file]).unwrap_or_else(|error| panic!("{file}: {error}")));
        let names = source.modules.clone();
        let index = self.0.len();
        self.0.push(Module { file: file.to_owned(), above, children: BTreeMap::new(), source });
        for name in names {
            let file = files::module_files(file, &name).into_iter().find(|file| texts.contains_key(file));
            if let Some(file) = file {
                let child = self.load(texts, &file, Some(index));
                self.0[index].children.insert(name, child);
            }
        }
        index
    }

    /// Files with an import of `item`, or a path to it: the end of a path, `plan::plan`.
    pub(super) fn with_path_to(&self, item: &str) -> BTreeSet<String> {
        let end = format!("::{item}");
        let is_item = |path: &Vec<String>| format!("::{}", path.join("::")).ends_with(&end);
        let has_item = |module: &&Module| {
            let imports = module.source.imports.iter().map(|import| &import.path);
            imports.chain(&module.source.paths).any(is_item)
        };
        self.0.iter().filter(has_item).map(|module| module.file.clone()).collect()
    }

    fn around(&self, module: usize) -> impl Iterator<Item = usize> {
        std::iter::successors(self.0[module].above, |above| self.0[*above].above)
    }

    pub(super) fn needed_by(&self, module: usize) -> BTreeSet<usize> {
        let source = &self.0[module].source;
        let is_used = |import: &&Import| !import.is_public || source.words.contains(&import.name);
        let imports = source.imports.iter().filter(is_used).map(|import| &import.path);
        let targets = imports.chain(&source.paths).flat_map(|path| self.resolve(module, path, MOST_STEPS));
        let items = targets.filter_map(|target| match target {
            Target::ItemOf(other) => Some(other),
            Target::Module(_) => None,
        });
        items.filter(|other| *other != module && self.around(module).all(|above| above != *other)).collect()
    }

    /// Targets of a path in the text of `from`: several where a name depends on the architecture.
    fn resolve(&self, from: usize, path: &[String], steps: usize) -> BTreeSet<Target> {
        let (Some((first, rest)), Some(steps)) = (path.split_first(), steps.checked_sub(1)) else {
            return BTreeSet::new();
        };
        match first.as_str() {
            "crate" => self.inside(self.around(from).last().unwrap_or(from), rest, steps, true),
            "self" => self.inside(from, rest, steps, true),
            "super" => match self.0[from].above {
                Some(above) if rest.first().is_some_and(|next| next == "super") => {
                    self.resolve(above, rest, steps)
                }
                Some(above) => self.inside(above, rest, steps, true),
                None => BTreeSet::new(),
            },
            _ => self.inside(from, path, steps, false),
        }
    }

    /// Targets of `path` in `module`. `is_sure`: the module has the name, if only by a macro.
    fn inside(&self, module: usize, path: &[String], steps: usize, is_sure: bool) -> BTreeSet<Target> {
        let Some((name, rest)) = path.split_first() else { return [Target::Module(module)].into() };
        let Module { children, source, .. } = &self.0[module];
        if let Some(child) = children.get(name) {
            return self.inside(*child, rest, steps, true);
        }
        if name == "*" || source.defined.contains(name) {
            return [Target::ItemOf(module)].into();
        }
        let mut found = BTreeSet::new();
        for import in
            source.imports.iter().filter(|import| import.name == *name && import.path != [name.clone()])
        {
            for target in self.resolve(module, &import.path, steps) {
                match target {
                    Target::Module(other) => found.extend(self.inside(other, rest, steps, true)),
                    item @ Target::ItemOf(_) => _ = found.insert(item),
                }
            }
        }
        let globs = source.imports.iter().filter(|import| import.name == "*" && found.is_empty());
        let globs: Vec<&[String]> = globs.filter_map(|import| Some(import.path.split_last()?.1)).collect();
        for target in globs.into_iter().flat_map(|glob| self.resolve(module, glob, steps)) {
            if let (Target::Module(other), Some(steps)) = (target, steps.checked_sub(1)) {
                found.extend(self.inside(other, path, steps, false));
            }
        }
        if found.is_empty() && is_sure { [Target::ItemOf(module)].into() } else { found }
    }
}
